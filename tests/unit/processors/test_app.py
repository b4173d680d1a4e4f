"""What a worker verifies before it joins."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from penstock.common import admin
from penstock.processors.app import CannotStart, verify_topics
from penstock.processors.settings import WorkerSettings
from penstock.schemas.topics import TopicNames


@pytest.mark.parametrize("topic", [TopicNames().control, TopicNames().desired])
def test_a_topic_whose_order_counts_must_have_one_partition(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = defaultdict(lambda: 4, {TopicNames().control: 1, TopicNames().desired: 1})

    def partition_counts(settings: Any, topics: list[str]) -> dict[str, int]:
        return {name: counts[name] for name in topics}

    monkeypatch.setattr(admin, "partition_counts", partition_counts)
    assert set(verify_topics(WorkerSettings()).values()) == {4}
    counts[topic] = 2
    with pytest.raises(CannotStart, match=f"{topic} must have one partition, it has 2"):
        verify_topics(WorkerSettings())
