"""The publisher: done only after the broker's ack, a substitute for what is too large, order kept at a full queue."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from penstock.processors.kafka.publisher import Publisher
from penstock.producers.transport import Delivery
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BadAvro, BrokerUnavailable, Overloaded, PenstockError, TooLarge
from penstock.schemas.records import DeadLetter, Origin, ResultEvent, StatusEvent
from penstock.schemas.topics import TopicNames

NAMES = TopicNames()
ORIGIN = Origin(topic="t", partition=0, offset=3, append_time_ms=0)


class FakeTransport:
    """Takes records and lets the test acknowledge them; `refuse` is raised for the next sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, Callable[[Delivery], None]]] = []
        self.refuse: list[PenstockError | None] = []

    def produce_nowait(self, topic: str, value: bytes | None, *, callback: Any = None, **_: Any) -> None:
        error = self.refuse.pop(0) if self.refuse else None
        if error is not None:
            raise error
        self.sent.append((topic, value or b"", callback))

    def deliver(self, index: int, error: PenstockError | None = None) -> None:
        topic, _, callback = self.sent[index]
        callback(Delivery(topic=topic, partition=0, offset=index, timestamp_ms=0, error=error))

    def events(self) -> list[ResultEvent]:
        return [default_codec().decode(value, ResultEvent) for topic, value, _ in self.sent if topic == NAMES.result]


def make() -> tuple[FakeTransport, Publisher, list[str]]:
    transport = FakeTransport()
    return transport, Publisher(transport, default_codec(), NAMES), []


def result(text: str = "x", request_id: str = "r1") -> ResultEvent:
    return ResultEvent(
        request_id=request_id, tenant="default", kind="terminal", origin=ORIGIN, attempt=1, epoch=1,
        task="text_generation", created_at=0, worker_id="w", status="completed", text_generation={"text": text},
    )  # fmt: skip


def status(*, done: bool = False) -> StatusEvent:
    return StatusEvent(
        request_id="r1", tenant="default", status="running", done=done, rank=40, attempt=1, epoch=1, origin=ORIGIN,
        worker_id="w", created_at=0,
    )  # fmt: skip


def test_done_follows_the_acknowledgement() -> None:
    transport, publisher, done = make()
    publisher.result(result(), lambda _: done.append("r1"))
    assert done == []
    assert publisher.unacknowledged == 1
    transport.deliver(0)
    assert done == ["r1"]
    assert publisher.unacknowledged == 0


def test_what_the_queue_refuses_is_offered_again_in_order() -> None:
    transport, publisher, done = make()
    transport.refuse = [Overloaded("full"), Overloaded("full")]
    publisher.result(result(request_id="a"), lambda _: done.append("a"))
    publisher.result(result(request_id="b"), lambda _: done.append("b"))
    assert publisher.backlog == 2
    publisher.tick()
    assert publisher.backlog == 2
    publisher.tick()
    assert [event.request_id for event in transport.events()] == ["a", "b"]
    assert publisher.backlog == 0


def test_a_lost_delivery_is_sent_again() -> None:
    transport, publisher, done = make()
    publisher.result(result(), lambda _: done.append("r1"))
    transport.deliver(0, BrokerUnavailable("timed out"))
    assert done == []
    publisher.tick()
    transport.deliver(1)
    assert done == ["r1"]


def test_too_large_becomes_a_small_failure_at_once_and_after_the_fact() -> None:
    for at_once in (True, False):
        transport, publisher, done = make()
        if at_once:
            transport.refuse = [TooLarge("more than 1,000,000 bytes")]
        publisher.result(result("x" * 5000), lambda failure, done=done: done.append(failure.code))
        if not at_once:
            transport.deliver(0, TooLarge("more than 1,000,000 bytes"))
        event = transport.events()[-1]
        assert (event.kind, event.status, event.output) == ("terminal", "failed", None)
        assert event.error is not None
        assert event.error.code == "too_large"
        transport.deliver(len(transport.sent) - 1)
        assert done == ["too_large"], "who counts outcomes must hear that it is another one"


def test_a_text_that_no_encoding_takes_becomes_a_small_failure() -> None:
    transport, publisher, done = make()
    publisher.result(result("\ud800"), lambda _: done.append("r1"))
    event = transport.events()[0]
    assert event.status == "failed"
    assert event.error is not None
    assert event.error.code == "internal"


def test_a_chunk_that_can_never_be_published_is_refused_aloud() -> None:
    transport, publisher, _ = make()
    chunk = dataclasses.replace(result(), kind="chunk", status=None, text_generation=None, text="x")
    publisher.chunk(chunk)
    assert [event.kind for event in transport.events()] == ["chunk"]
    with pytest.raises(BadAvro):
        publisher.chunk(dataclasses.replace(chunk, text="\ud800"))
    transport.refuse = [TooLarge("too large")]
    with pytest.raises(TooLarge):
        publisher.chunk(chunk)
    assert publisher.backlog == 0


def test_a_status_on_the_way_is_only_advice_but_the_last_one_is_kept() -> None:
    transport, publisher, _ = make()
    transport.refuse = [Overloaded("full"), Overloaded("full")]
    publisher.status(status())
    assert publisher.backlog == 0
    publisher.status(status(done=True))
    assert publisher.backlog == 1


def test_a_dead_letter_that_is_too_large_keeps_its_first_bytes() -> None:
    transport, publisher, done = make()
    transport.refuse = [TooLarge("too large")]
    letter = DeadLetter(
        reason_code="too_large", reason="r", original=b"y" * 200_000, original_key=b"k" * 900_000, origin=ORIGIN,
        worker_id="w", created_at=0,
    )  # fmt: skip
    publisher.dead_letter(letter, lambda: done.append("dlq"))
    kept = default_codec().decode(transport.sent[0][1], DeadLetter)
    assert kept.original == b"y" * 65536
    assert kept.original_key is None
    assert "200000 bytes" in kept.reason
    transport.deliver(0)
    assert done == ["dlq"]
