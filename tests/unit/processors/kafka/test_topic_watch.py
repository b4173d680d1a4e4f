"""What the broker says of topics, also one that was away or has started a moment ago."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock, call

import pytest

from penstock.common.settings import KafkaSettings
from penstock.processors.kafka import topic_watch
from penstock.processors.kafka.topic_watch import PartitionWatch, PoolTopics
from penstock.schemas.errors import BrokerUnavailable
from support import wait_until_async

TOPIC = "inference.request.text.gpu"


async def test_a_broker_that_knows_no_topics_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, answers = Mock(return_value={}), list[str]()
    monkeypatch.setattr(topic_watch.admin, "partition_counts", counts)
    monkeypatch.setattr(topic_watch, "AGAIN_S", 0.01)
    pools = PoolTopics(KafkaSettings())
    pools.look(TOPIC, lambda: answers.append("there"), lambda: answers.append("missing"))
    await wait_until_async(lambda: counts.call_count > 1 or answers, 5)
    assert answers == []
    counts.return_value = {"inference.result": 1, TOPIC: 1}
    await wait_until_async(lambda: answers, 5)
    assert answers == ["there"]
    assert all(TOPIC in asked.args[1] for asked in counts.mock_calls)


async def test_a_topic_that_is_missing_among_others_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_watch.admin, "partition_counts", lambda *_: {"inference.result": 1})
    answers: list[str] = []
    PoolTopics(KafkaSettings()).look(TOPIC, lambda: answers.append("there"), lambda: answers.append("missing"))
    await wait_until_async(lambda: answers, 5)
    assert answers == ["missing"]


async def test_new_counts_are_passed_on_also_after_the_broker_was_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    admin = Mock(**{"partition_counts.side_effect": [{"t": 4}, BrokerUnavailable("away"), {"t": 8}]})
    monkeypatch.setattr(topic_watch, "admin", admin)
    monkeypatch.setattr(topic_watch, "now_ms", Mock(side_effect=[100, 200, 300, 400]))
    monkeypatch.setattr(topic_watch, "LOOK_EACH_S", 0.001)
    learn = Mock(side_effect=[{}, {"t": 4}])
    watch = PartitionWatch(None, ["t"], learn)  # type: ignore[arg-type]
    running = asyncio.create_task(watch.run_forever())
    await wait_until_async(lambda: learn.call_count == 2, 10)
    running.cancel()
    assert learn.mock_calls == [call({"t": 4}, 100), call({"t": 8}, 300)]
    assert "partitions.changed topic=t from=4 to=8" in caplog.text
