"""Whether another pool's topic is there, as a broker tells it that may have started a moment ago."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from penstock.common.settings import KafkaSettings
from penstock.processors.kafka import pool_topics
from penstock.processors.kafka.pool_topics import PoolTopics
from support import wait_until_async

TOPIC = "inference.request.text.gpu"


async def test_a_broker_that_knows_no_topics_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, answers = Mock(return_value={}), list[str]()
    monkeypatch.setattr(pool_topics.admin, "partition_counts", counts)
    monkeypatch.setattr(pool_topics, "AGAIN_S", 0.01)
    pools = PoolTopics(KafkaSettings())
    pools.look(TOPIC, lambda: answers.append("there"), lambda: answers.append("missing"))
    await wait_until_async(lambda: counts.call_count > 1 or answers, 5)
    assert answers == []
    counts.return_value = {"inference.result": 1, TOPIC: 1}
    await wait_until_async(lambda: answers, 5)
    assert answers == ["there"]
    assert all(TOPIC in asked.args[1] for asked in counts.mock_calls)


async def test_a_topic_that_is_missing_among_others_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_topics.admin, "partition_counts", lambda *_: {"inference.result": 1})
    answers: list[str] = []
    PoolTopics(KafkaSettings()).look(TOPIC, lambda: answers.append("there"), lambda: answers.append("missing"))
    await wait_until_async(lambda: answers, 5)
    assert answers == ["missing"]
