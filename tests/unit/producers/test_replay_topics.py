"""Where the conversations of a replay stand, as a broker tells them that may have started a moment ago."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.producers.replay_topics import ReplayTopics
from penstock.schemas.errors import BrokerUnavailable


def test_a_broker_that_knows_no_topics_yet_ends_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended at once, as if the tenant had no conversations."""
    known: dict[str, int] = {}

    def partition_counts(*_: Any, **__: Any) -> dict[str, int]:
        return known

    monkeypatch.setattr(admin, "partition_counts", partition_counts)
    topics = ReplayTopics(KafkaSettings(), "default", "t*", 1.0)
    with pytest.raises(BrokerUnavailable):
        topics.list()
    known |= {"inference.result": 1, "conversation.trip": 1, "conversation.other": 1}
    assert list(topics.list()) == [("conversation.trip", 0)]
