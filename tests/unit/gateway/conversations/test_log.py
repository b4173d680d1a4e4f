"""Consumers that read conversations are used again, are replaced when they fail, and go with the gateway."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.conversations import log as log_module
from penstock.gateway.conversations.log import IDLE, USES, KafkaLog
from penstock.gateway.conversations.topics import OwnTopics
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable, NotFound


@dataclass
class Stage:
    """In the place of librdkafka: consumers that were made, and whether the next readings fail."""

    made: list[Consumer] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    on_read: Callable[[], object] = lambda: None

    def make(self, *_: Any, **__: Any) -> Consumer:
        self.made.append(Consumer(self))
        return self.made[-1]

    @property
    def opened(self) -> int:
        return sum(not one.closed for one in self.made)


@dataclass(eq=False)
class Consumer:
    stage: Stage
    closed: bool = False
    reads: int = 0

    def list_topics(self, *_: Any, **__: Any) -> None:
        self.reads += 1
        self.stage.on_read()
        if self.stage.failures:
            raise self.stage.failures.pop(0)

    def unassign(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(log_module, "make_consumer", made.make)
    monkeypatch.setattr(log_module, "read_with", lambda *_: [])
    return made


def read(log: KafkaLog) -> None:
    log.read("t", 0, 1, time.monotonic() + 20)


def test_one_consumer_reads_again_and_again_until_it_is_replaced(stage: Stage) -> None:
    log = KafkaLog(KafkaSettings())
    for _ in range(USES):
        read(log)
    assert ([one.reads for one in stage.made], stage.opened) == ([USES], 0)
    read(log)
    assert [one.reads for one in stage.made] == [USES, 1]
    log.close()
    assert stage.opened == 0


def test_a_used_consumer_that_fails_is_replaced_and_a_new_one_tells_the_failure(stage: Stage) -> None:
    log = KafkaLog(KafkaSettings())
    read(log)
    stage.failures = [BrokerUnavailable("stale")]
    read(log)
    assert [one.closed for one in stage.made] == [True, False]
    stage.failures = [BrokerUnavailable("stale"), BrokerUnavailable("away")]
    with pytest.raises(BrokerUnavailable, match="away"):
        read(log)
    assert stage.opened == 0
    stage.failures = [RuntimeError("a defect")]
    with pytest.raises(RuntimeError):
        read(log)
    assert stage.opened == 0


def test_a_long_reading_that_fails_goes_on_with_another_consumer_where_it_was(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = KafkaLog(KafkaSettings())
    read(log)
    failures = {4: BrokerUnavailable("stale")}

    def batches(_: Any, tp: tuple[str, int], begin: int, end: int, *__: Any, **___: Any) -> Iterator[list[RawMessage]]:
        for first in range(begin, end, 2):
            if first in failures:
                raise failures.pop(first)
            yield [RawMessage(tp[0], 0, offset, 0, None, None) for offset in range(first, min(end, first + 2))]

    monkeypatch.setattr(log_module, "read_batches", batches)
    give_up = time.monotonic() + 20
    found = [[one.offset for one in some] for some in log.batches("t", 0, 7, give_up, 2)]
    assert found == [[0, 1], [2, 3], [4, 5], [6]]
    assert [one.closed for one in stage.made] == [True, False]
    assert list(log.batches("t", 7, 7, give_up, 2)) == []
    failures[2] = BrokerUnavailable("away")
    log.close()
    with pytest.raises(BrokerUnavailable, match="away"):
        list(log.batches("t", 0, 7, give_up, 2))
    assert stage.opened == 0


def test_the_pool_keeps_some_consumers_and_none_after_the_end(stage: Stage) -> None:
    log, together = KafkaLog(KafkaSettings()), threading.Barrier(IDLE + 3)
    stage.on_read = together.wait
    with ThreadPoolExecutor(IDLE + 3) as threads:
        list(threads.map(lambda _: read(log), range(IDLE + 3)))
    assert (len(stage.made), stage.opened) == (IDLE + 3, IDLE)
    stage.on_read = log.close
    read(log)
    assert stage.opened == 0


def test_a_topic_that_is_deleted_while_last_records_are_read_is_left_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = {"a": 3, "b": 2, "empty": 0}

    def ends(_: Any, partitions: list[tuple[str, int]]) -> dict[tuple[str, int], int]:
        if topics.pop("b", None) is not None:
            raise NotFound("b")
        return {tp: topics[tp[0]] for tp in partitions}

    monkeypatch.setattr(log_module.admin, "partition_counts", lambda _, names: dict.fromkeys(set(topics) & {*names}, 1))
    monkeypatch.setattr(log_module.admin, "end_offsets", ends)
    log = KafkaLog(KafkaSettings())
    assert log.last_records(["a", "b", "empty"], time.monotonic() + 20) == {"a": None}
    with pytest.raises(BrokerUnavailable):
        log.last_records(["a"], time.monotonic())


def test_a_broker_without_any_topics_is_not_taken_for_one_without_conversations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: dict[str, int] = {}
    monkeypatch.setattr(log_module.admin, "partition_counts", lambda *_, **__: known)
    layout = OwnTopics(GatewaySettings())
    with pytest.raises(BrokerUnavailable):
        layout.everyone()
    known |= {"inference.result": 1, "conversation.trip": 1, "conversations.acme.plan": 1}
    assert layout.everyone() == [("default", "trip"), ("acme", "plan")]
    assert layout.ids("acme") == ["plan"]
