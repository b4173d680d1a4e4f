"""The publisher: done only after the broker's ack, a substitute for what is too large, order kept at a full queue."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.transport import Delivery
from penstock.processors.kafka.publisher import (
    AGAIN_S,
    GATHERED_RECORDS,
    LETTER_WINDOW,
    UNANSWERED_S,
    UNASKED_S,
    Publisher,
)
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, Forbidden, NotFound, Overloaded, PenstockError, TooLarge
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
    """A second passes each time that the publisher looks at the clock."""
    transport, seconds = FakeTransport(), itertools.count()
    return transport, Publisher(transport, default_codec(), NAMES, clock=lambda: float(next(seconds))), []


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


def letter(**fields: Any) -> DeadLetter:
    fixed = {"reason_code": "r", "reason": "r", "original": b"y", "worker_id": "w", "created_at": 0}
    return DeadLetter(origin=ORIGIN, **{**fixed, **fields})


def chunk(text: str = "x") -> ResultEvent:
    return dataclasses.replace(result(), kind="chunk", status=None, text_generation=None, text=text)


def no_refusal(error: PenstockError) -> None:
    raise AssertionError(error)


def test_done_follows_the_acknowledgement_and_a_lost_delivery_is_sent_again() -> None:
    transport, publisher, done = make()
    publisher.result(result(), lambda _: done.append("r1"))
    assert (done, publisher.unacknowledged) == ([], 1)
    transport.deliver(0, BrokerUnavailable("timed out"))
    assert done == []
    publisher.tick()
    transport.deliver(1)
    assert (done, publisher.unacknowledged) == (["r1"], 0)


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


@pytest.mark.parametrize(
    ("text", "at_once", "later", "code"),
    [
        ("x" * 5000, TooLarge("more than 1,000,000 bytes"), None, "too_large"),
        ("x" * 5000, None, TooLarge("more than 1,000,000 bytes"), "too_large"),
        ("x", TooLarge("\ud800"), None, "too_large"),
        ("x", None, TooLarge("\ud800", param="\ud800", details={"\ud800": "\ud800"}), "too_large"),
        ("\ud800", None, None, "internal"),
    ],
    ids=[
        "too large at once",
        "too large after the fact",
        "an error that no encoding takes",
        "such a one later",
        "a text that none takes",
    ],
)
def test_what_cannot_be_published_becomes_a_small_failure(
    text: str, at_once: PenstockError | None, later: PenstockError | None, code: str
) -> None:
    transport, publisher, done = make()
    transport.refuse = [at_once]
    publisher.result(result(text), lambda failure: done.append(failure.code))
    if later is not None:
        transport.deliver(0, later)
    event = transport.events()[-1]
    assert (event.kind, event.status, event.output) == ("terminal", "failed", None)
    assert event.error.code == code
    transport.deliver(len(transport.sent) - 1)
    assert done == [code], "who counts outcomes must hear that it is another one"


def test_a_chunk_that_can_never_be_published_is_refused_aloud() -> None:
    transport, publisher, _ = make()
    refused: list[PenstockError] = []
    publisher.chunk(chunk(), refused=refused.append)
    assert [event.kind for event in transport.events()] == ["chunk"]
    publisher.chunk(chunk("\ud800"), refused=refused.append)
    publisher.chunk(chunk("x" * 1_000_000), refused=refused.append)
    # A broker that takes less than is configured.
    transport.refuse = [Overloaded("full")]
    publisher.chunk(chunk(), refused=refused.append)
    transport.refuse = [TooLarge("too large")]
    publisher.tick()
    transport.deliver(0, TooLarge("too large"))
    assert [error.code for error in refused] == ["bad_avro", "too_large", "too_large", "too_large"]
    assert (publisher.backlog, publisher.unacknowledged, publisher.chunk_bytes) == (0, 0, 0)


def test_chunks_are_counted_until_the_broker_has_them() -> None:
    transport, publisher, _ = make()
    transport.refuse = [None, Overloaded("full")]
    publisher.chunk(chunk("x" * 5000), refused=no_refusal)
    publisher.chunk(chunk("x" * 5000), refused=no_refusal)
    assert publisher.chunk_bytes > 2 * 5000
    publisher.tick()
    transport.deliver(0, BrokerUnavailable("timed out"))
    transport.deliver(1)
    assert 5000 < publisher.chunk_bytes < 7000
    publisher.tick()
    transport.deliver(2)
    assert publisher.chunk_bytes == 0


def test_what_the_broker_refused_is_sent_again_before_later_records_of_its_key_and_delays_no_other() -> None:
    transport, seconds = FakeTransport(), [0.0]
    publisher = Publisher(transport, default_codec(), NAMES, clock=lambda: seconds[0])
    for text in "abc":
        publisher.chunk(chunk(text), refused=no_refusal)
    transport.deliver(1, BrokerUnavailable("timed out"))
    transport.deliver(0, BrokerUnavailable("timed out"))
    transport.deliver(2)
    publisher.chunk(chunk("d"), refused=no_refusal)
    publisher.result(result(request_id="other"), lambda _: None)
    assert ids(transport)[3:] == ["other"]
    assert "refuses 3 records" in (publisher.trouble or "")
    assert "timed out" in (publisher.trouble or "")
    publisher.tick()
    assert len(transport.sent) == 4, "a tick comes every 10 ms"
    seconds[0] += AGAIN_S
    publisher.tick()
    assert [event.text for event in transport.events()[4:]] == ["a", "b", "d"]
    assert publisher.trouble is None
    seconds[0] += UNANSWERED_S
    assert publisher.trouble == f"Kafka has not acknowledged 4 records, the oldest for {UNANSWERED_S + AGAIN_S:.0f} s"


@pytest.mark.parametrize("at_once", [True, False], ids=["by the client", "by the broker"])
def test_one_record_asks_again_for_a_topic_that_takes_none(at_once: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Every record of the topic was sent each second; those that the client refused stood before all other topics."""
    transport, seconds, acknowledged = FakeTransport(), [0.0], list[str]()
    publisher = Publisher(transport, default_codec(), NAMES, clock=lambda: seconds[0])
    error = Forbidden("needs WRITE on the topic")

    def refused_now() -> None:
        if at_once:
            transport.refuse = [error]
        else:
            transport.deliver(len(transport.sent) - 1, error)

    if at_once:
        refused_now()
    for number in range(50):
        publisher.result(result(request_id=f"{number:02}"), lambda _, n=number: acknowledged.append(f"{n:02}"))
        if number == 0 and not at_once:
            refused_now()
    asked = len(transport.sent)
    publisher.status(status(done=True))
    assert transport.sent[-1][0] == NAMES.status, "other topics go on"
    transport.deliver(len(transport.sent) - 1)
    for _ in range(30):
        seconds[0] += AGAIN_S
        if at_once:
            refused_now()
        for _ in range(5):
            publisher.tick()
        if not at_once:
            refused_now()
    assert len(transport.sent) - asked - 1 == (0 if at_once else 30), "one each second"
    assert publisher.trouble == "Kafka refuses 50 records, which are sent again: needs WRITE on the topic"
    assert len(caplog.records) == 1
    seconds[0] += AGAIN_S
    publisher.tick()
    transport.deliver(len(transport.sent) - 1)
    for index in range(len(transport.sent) - 49, len(transport.sent)):
        transport.deliver(index)
    assert acknowledged == [f"{number:02}" for number in range(50)], "in their order, none is lost"
    assert (publisher.trouble, publisher.backlog) == (None, 0)


def test_facts_for_a_topic_that_takes_none_are_dropped_and_the_next_asks_again() -> None:
    transport, seconds = FakeTransport(), [0.0]
    publisher = Publisher(transport, default_codec(), NAMES, clock=lambda: seconds[0])

    def fact() -> None:
        publisher.record(NAMES.worker, "w", None)

    fact()
    transport.deliver(0, Forbidden("needs WRITE on the topic"))
    fact()
    assert (len(transport.sent), publisher.backlog) == (1, 0)
    assert publisher.trouble == "Kafka refuses 0 records, which are sent again: needs WRITE on the topic"
    seconds[0] += AGAIN_S
    fact()
    transport.deliver(1)
    fact()
    assert (len(transport.sent), publisher.trouble) == (3, None)


def test_a_topic_that_refused_only_advice_is_no_trouble_once_nobody_writes_to_it() -> None:
    """An idle worker would not be ready after the grant: no status comes that asks again."""
    transport, seconds = FakeTransport(), [0.0]
    publisher = Publisher(transport, default_codec(), NAMES, clock=lambda: seconds[0])
    publisher.status(status())
    transport.deliver(0, Forbidden("needs WRITE on the topic"))
    seconds[0] += AGAIN_S
    assert "needs WRITE" in (publisher.trouble or "")
    seconds[0] += UNASKED_S
    assert publisher.trouble is None
    publisher.status(status(done=True))
    transport.deliver(1, Forbidden("needs WRITE on the topic"))
    seconds[0] += AGAIN_S + UNASKED_S
    assert "refuses 1 records" in (publisher.trouble or "")


def test_a_partition_that_is_gone_holds_up_no_other_record_of_the_topic() -> None:
    transport, seconds = FakeTransport(), [0.0]
    publisher = Publisher(transport, default_codec(), NAMES, clock=lambda: seconds[0])

    def move(key: bytes, partition: int | None) -> None:
        publisher.republish("t", key, key=key, headers=[], partition=partition, done=lambda: None, refused=no_refusal)

    move(b"gone", 9)
    transport.deliver(0, NotFound("topic t does not exist"))
    move(b"other", None)
    assert [value for _, value, _ in transport.sent] == [b"gone", b"other"]
    transport.deliver(1)
    assert "refuses 1 records" in (publisher.trouble or "")
    seconds[0] += AGAIN_S
    publisher.tick()
    transport.deliver(2)
    assert (publisher.trouble, publisher.backlog) == (None, 0)


def test_what_nothing_can_make_smaller_waits_and_is_named() -> None:
    """Its request waited for ever in silence: its offset was never committed, and nothing looked at it again."""
    transport, publisher, done = make()
    publisher.result(result(), lambda _: done.append("r1"))
    transport.deliver(0, TooLarge("too large"))
    transport.deliver(1, TooLarge("the failure too"))
    assert "the failure too" in (publisher.trouble or "")
    publisher.tick()
    transport.deliver(2)
    assert (done, publisher.trouble) == (["r1"], None)


def test_a_status_on_the_way_is_only_advice_but_the_last_one_is_kept() -> None:
    transport, publisher, _ = make()
    transport.refuse = [Overloaded("full"), Overloaded("full")]
    publisher.status(status())
    assert publisher.backlog == 0
    publisher.status(status(done=True))
    assert publisher.backlog == 1


def test_a_dead_letter_that_is_too_large_or_in_words_that_cannot_be_encoded_is_still_sent() -> None:
    transport, publisher, done = make()
    transport.refuse = [TooLarge("too large")]
    publisher.dead_letter(letter(original=b"y" * 200_000, original_key=b"k" * 900_000), lambda: done.append("large"))
    publisher.dead_letter(letter(reason="\ud800", error_chain=["\ud800"]), lambda: done.append("odd"))
    large, odd = (default_codec().decode(value, DeadLetter) for _, value, _ in transport.sent)
    assert (large.original, large.original_key) == (b"y" * 65536, None)
    assert "200000 bytes" in large.reason
    assert odd.original == b"y"
    transport.deliver(0)
    transport.deliver(1)
    assert done == ["large", "odd"]


class ManualLoop:
    """The part of an event loop that gathering needs; the test lets the time come."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, _delay_s: float, callback: Callable[[], None]) -> Any:
        self.due.append(callback)
        return SimpleNamespace(cancel=lambda: self.due.remove(callback) if callback in self.due else None)


def gathering() -> tuple[FakeTransport, Publisher, ManualLoop]:
    transport, loop = FakeTransport(), ManualLoop()
    made = Publisher(transport, default_codec(), NAMES, loop=loop)  # pyright: ignore[reportArgumentType]
    return transport, made, loop


def ids(transport: FakeTransport) -> list[str]:
    return [event.request_id for event in transport.events()]


def test_while_nothing_is_under_way_a_record_leaves_at_once_and_then_others_gather() -> None:
    transport, publisher, loop = gathering()
    for name in "abc":
        publisher.result(result(request_id=name), lambda _: None)
    assert ids(transport) == ["a"]
    assert publisher.backlog == 2
    loop.due.pop()()
    assert ids(transport) == ["a", "b", "c"]
    assert publisher.backlog == 0


def test_what_gathered_leaves_when_the_last_answer_comes_or_enough_is_there() -> None:
    transport, publisher, loop = gathering()
    for name in "ab":
        publisher.result(result(request_id=name), lambda _: None)
    transport.deliver(0)
    assert ids(transport) == ["a", "b"]
    assert not loop.due
    for number in range(GATHERED_RECORDS):
        publisher.result(result(request_id=f"r{number}"), lambda _: None)
    assert len(transport.sent) == 2 + GATHERED_RECORDS


def test_a_flood_of_dead_letters_has_a_small_window_and_results_pass_it() -> None:
    transport, publisher, done = make()
    for number in range(5000):
        publisher.dead_letter(letter(), lambda number=number: done.append(str(number)))
    assert len(transport.sent) == LETTER_WINDOW
    publisher.result(result(), lambda _: done.append("result"))
    assert transport.sent[LETTER_WINDOW][0] == NAMES.result
    for index in range(5001):
        transport.deliver(index)
    assert sorted(done) == sorted(["result", *(str(number) for number in range(5000))])
    assert (publisher.backlog, publisher.unacknowledged) == (0, 0)


def test_the_status_that_ends_a_request_is_never_lost() -> None:
    """Whatever its detail holds and whatever the broker says: unencodable, refused, too large, lost on the way."""
    transport, publisher, _ = make()
    publisher.status(dataclasses.replace(status(done=True), detail="\ud800"))
    assert default_codec().decode(transport.sent[0][1], StatusEvent).detail is None
    transport.refuse = [Overloaded("full"), TooLarge("too large")]
    publisher.status(dataclasses.replace(status(done=True), detail="x" * 5000))
    publisher.tick()
    assert default_codec().decode(transport.sent[1][1], StatusEvent).detail is None
    transport.deliver(1, BrokerUnavailable("timed out"))
    publisher.tick()
    transport.deliver(2)
    transport.deliver(0)
    assert (publisher.backlog, publisher.unacknowledged) == (0, 0)


def test_what_is_impossible_does_not_stand_before_the_rest() -> None:
    transport, publisher, _ = make()
    transport.refuse = [Overloaded("full")]
    publisher.chunk(chunk(), refused=lambda _: None)
    publisher.result(result(request_id="after"), lambda _: None)
    transport.refuse = [TooLarge("more than the broker takes")]
    publisher.tick()
    assert ids(transport) == ["after"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_record_that_is_too_large_to_be_moved_is_told(at_once: bool) -> None:
    """Its header grows by its origin. Nobody heard of it, so that its offset was never committed."""
    transport, publisher, _ = make()
    refused: list[PenstockError] = []
    if at_once:
        transport.refuse = [TooLarge("beyond the limit")]
    publisher.republish("t", b"x", key=b"k", headers=[], partition=1, done=lambda: None, refused=refused.append)
    if not at_once:
        transport.deliver(0, TooLarge("beyond the limit"))
    assert [error.code for error in refused] == ["too_large"]
    assert publisher.backlog == publisher.unacknowledged == 0
