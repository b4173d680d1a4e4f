"""Topics that may not be read: named until the right is granted, however busy the reader is meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from penstock.common import admin, read_rights, reader
from penstock.common.read_rights import ReadRights
from penstock.common.reader import PartitionReader
from penstock.common.settings import KafkaSettings
from support import wait_until

REFUSED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rights, "LOOK_S", 0.0)


def test_a_topic_that_is_refused_during_a_look_stays_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rights = ReadRights(KafkaSettings())
    rights.note(REFUSED, "granted")

    def lacking(*_: Any) -> set[str]:
        rights.note(REFUSED, "later")
        return set()

    monkeypatch.setattr(admin, "lacking", lacking)
    rights.look()
    assert rights.topics == {"later"}


def message(topic: str, error: KafkaError | None = None) -> Any:
    facts: dict[str, Any] = {
        "topic": topic, "partition": 0, "offset": 1, "timestamp": (1, 1), "key": None, "value": None, "headers": None,
    }  # fmt: skip
    return SimpleNamespace(error=lambda: error, **{name: lambda fact=fact: fact for name, fact in facts.items()})


class Busy:
    """A consumer that always has a record."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.first = [message("refused", REFUSED)]

    def poll(self, _timeout_s: float) -> Any:
        return self.first.pop() if self.first else message(self.topic)

    def consume(self, _count: int, _timeout_s: float) -> list[Any]:
        return []

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.mark.parametrize(
    ("topic", "lacks"), [("busy", set[str]()), ("refused", {"refused"})], ids=["Kafka is asked", "its record comes"]
)
def test_a_reader_of_busy_topics_sees_the_grant(monkeypatch: pytest.MonkeyPatch, topic: str, lacks: set[str]) -> None:
    def lacking(*_: Any) -> set[str]:
        return lacks

    monkeypatch.setattr(reader, "make_consumer", lambda *_, **__: Busy(topic))
    monkeypatch.setattr(admin, "lacking", lacking)
    batches = list[Any]()
    made = PartitionReader(KafkaSettings(), {("busy", 0): 0, ("refused", 0): 0}, batches.append)
    try:
        made.start()
        wait_until(lambda: len(batches) > 3)
        assert made.rights.reason is None
    finally:
        made.stop()
