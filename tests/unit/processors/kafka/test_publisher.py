"""The publisher: done only after the broker's ack, a substitute for what is too large, order kept at a full queue."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kit.records import ORIGIN, outcome, status
from kit.records import chunk as chunk_of
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
from penstock.schemas.records import DeadLetter, ResultEvent, StatusEvent
from penstock.schemas.topics import TopicNames

NAMES = TopicNames()
CODEC = default_codec()
FULL, TIMED_OUT, NO_RIGHT = Overloaded("full"), BrokerUnavailable("timed out"), Forbidden("needs WRITE on the topic")


class Broker:
    """A transport, and the publisher on it. A test acknowledges records; `refuse` is raised for the next sends."""

    def __init__(self, *, gathers: bool = False) -> None:
        self.sent: list[tuple[str, bytes, Callable[[Delivery], None]]] = []
        self.refuse: list[PenstockError | None] = []
        self.refused: list[PenstockError] = []
        """What callers of the publisher heard."""
        self.done: list[str] = []
        self.seconds = 0.0
        self.due: list[Callable[[], None]] = []
        """Timers of the event loop, where records gather."""
        loop: Any = SimpleNamespace(call_later=self.call_later) if gathers else None
        self.publisher = Publisher(self, CODEC, NAMES, loop=loop, clock=lambda: self.seconds)

    def call_later(self, _delay_s: float, callback: Callable[[], None]) -> Any:
        self.due.append(callback)
        return SimpleNamespace(cancel=lambda: self.due.remove(callback) if callback in self.due else None)

    def produce_nowait(self, topic: str, value: bytes | None, *, callback: Any = None, **_: Any) -> None:
        error = self.refuse.pop(0) if self.refuse else None
        if error is not None:
            raise error
        self.sent.append((topic, value or b"", callback))

    def deliver(self, index: int, error: PenstockError | None = None) -> None:
        topic, _, callback = self.sent[index % len(self.sent)]
        callback(Delivery(topic=topic, partition=0, offset=index, timestamp_ms=0, error=error))

    def read(self, index: int, kind: type[Any]) -> Any:
        return CODEC.decode(self.sent[index][1], kind)

    def events(self) -> list[ResultEvent]:
        return [CODEC.decode(value, ResultEvent) for topic, value, _ in self.sent if topic == NAMES.result]

    def ids(self) -> list[str]:
        return [event.request_id for event in self.events()]

    def chunk(self, text: str = "x") -> None:
        self.publisher.chunk(chunk_of(text), refused=self.refused.append)

    def results(self, *names: str, text: str = "x") -> None:
        for name in names:
            event = outcome(name, text)
            self.publisher.result(event, lambda failure, name=name: self.done.append(failure.code if failure else name))

    def status(self, *, done: bool = False, **fields: Any) -> None:
        self.publisher.status(status(done=done, **fields))

    def letter(self, name: str, **fields: Any) -> None:
        facts = {"reason_code": "r", "reason": "r", "original": b"y", "worker_id": "w", "created_at": 0, **fields}
        self.publisher.dead_letter(DeadLetter(origin=ORIGIN, **facts), lambda: self.done.append(name))

    def republish(self, value: bytes, partition: int | None) -> None:
        self.publisher.republish(
            "t", value, key=value, headers=[], partition=partition, done=lambda: None, refused=self.refused.append
        )

    def tick(self, after_s: float = AGAIN_S) -> None:
        self.seconds += after_s
        self.publisher.tick()

    @property
    def trouble(self) -> str:
        return self.publisher.trouble or ""

    def assert_idle(self) -> None:
        held = self.publisher
        assert (held.backlog, held.unacknowledged, held.chunk_bytes, held.trouble) == (0, 0, 0, None)


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.mark.parametrize(
    ("text", "at_once", "later", "code"),
    [
        ("x" * 5000, TooLarge("more than 1,000,000 bytes"), None, "too_large"),
        ("x" * 5000, None, TooLarge("more than 1,000,000 bytes"), "too_large"),
        ("x", TooLarge("\ud800"), None, "too_large"),
        ("x", None, TooLarge("\ud800", param="\ud800", details={"\ud800": "\ud800"}), "too_large"),
        ("\ud800", None, None, "internal"),
    ],
    ids=["at once", "after the fact", "an error that no encoding takes", "such a one later", "a text that none takes"],
)
def test_what_cannot_be_published_becomes_a_small_failure(
    broker: Broker, text: str, at_once: PenstockError | None, later: PenstockError | None, code: str
) -> None:
    broker.refuse = [at_once]
    broker.results("r", text=text)
    if later is not None:
        broker.deliver(0, later)
    event = broker.events()[-1]
    assert (event.kind, event.status, event.output) == ("terminal", "failed", None)
    assert event.error.code == code
    broker.deliver(-1)
    assert broker.done == [code], "who counts outcomes must hear that it is another one"


def test_a_chunk_that_can_never_be_published_is_refused_aloud(broker: Broker) -> None:
    broker.chunk()
    assert [event.kind for event in broker.events()] == ["chunk"]
    broker.chunk("\ud800")
    broker.chunk("x" * 1_000_000)
    broker.refuse = [FULL]
    broker.chunk()
    broker.results("after")
    broker.refuse = [TooLarge("more than the broker takes")]
    broker.tick()
    assert broker.ids()[1:] == ["after"], "what is impossible does not stand before the rest"
    broker.deliver(0, TooLarge("too large"))
    broker.deliver(1)
    assert [error.code for error in broker.refused] == ["bad_avro", "too_large", "too_large", "too_large"]
    broker.assert_idle()


def test_chunks_are_counted_until_the_broker_has_them(broker: Broker) -> None:
    broker.refuse = [None, FULL]
    broker.chunk("x" * 5000)
    broker.chunk("x" * 5000)
    assert broker.publisher.chunk_bytes > 2 * 5000
    broker.tick()
    broker.deliver(0, TIMED_OUT)
    broker.deliver(1)
    assert 5000 < broker.publisher.chunk_bytes < 7000
    broker.tick()
    broker.deliver(2)
    broker.assert_idle()
    assert broker.refused == []


def test_what_the_broker_refused_is_sent_again_before_later_records_of_its_key_and_delays_no_other(
    broker: Broker,
) -> None:
    for text in "abc":
        broker.chunk(text)
    broker.deliver(1, TIMED_OUT)
    broker.deliver(0, TIMED_OUT)
    broker.deliver(2)
    broker.chunk("d")
    broker.results("other")
    assert broker.ids()[3:] == ["other"]
    assert "refuses 3 records" in broker.trouble
    assert "timed out" in broker.trouble
    broker.tick(0)
    assert len(broker.sent) == 4, "a tick comes every 10 ms"
    broker.tick()
    assert [event.text for event in broker.events()[4:]] == ["a", "b", "d"]
    assert broker.trouble == ""
    broker.seconds += UNANSWERED_S
    assert broker.trouble == f"Kafka has not acknowledged 4 records, the oldest for {UNANSWERED_S + AGAIN_S:.0f} s"


@pytest.mark.parametrize("at_once", [True, False], ids=["by the client", "by the broker"])
def test_one_record_asks_again_for_a_topic_that_takes_none(
    broker: Broker, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    names = [f"{number:02}" for number in range(50)]

    def refused_now() -> None:
        if at_once:
            broker.refuse = [NO_RIGHT]
        else:
            broker.deliver(-1, NO_RIGHT)

    if at_once:
        refused_now()
    broker.results(names[0])
    if not at_once:
        refused_now()
    broker.results(*names[1:])
    asked = len(broker.sent)
    broker.status(done=True)
    assert broker.sent[-1][0] == NAMES.status, "other topics go on"
    broker.deliver(-1)
    for _ in range(30):
        broker.seconds += AGAIN_S
        if at_once:
            refused_now()
        for _ in range(5):
            broker.tick(0)
        if not at_once:
            refused_now()
    assert len(broker.sent) - asked - 1 == (0 if at_once else 30), "one each second"
    assert broker.trouble == "Kafka refuses 50 records, which are sent again: needs WRITE on the topic"
    assert len(caplog.records) == 1
    broker.tick()
    assert (broker.done, broker.publisher.unacknowledged) == ([], 1)
    broker.deliver(-1)
    for index in range(-49, 0):
        broker.deliver(index)
    assert broker.done == names, "in their order, none is lost"
    broker.assert_idle()


def test_facts_for_a_topic_that_takes_none_are_dropped_and_the_next_asks_again(broker: Broker) -> None:
    def fact() -> None:
        broker.publisher.record(NAMES.worker, "w", None)

    fact()
    broker.deliver(0, NO_RIGHT)
    fact()
    assert (len(broker.sent), broker.publisher.backlog) == (1, 0)
    assert broker.trouble == "Kafka refuses 0 records, which are sent again: needs WRITE on the topic"
    broker.seconds += AGAIN_S
    fact()
    broker.deliver(1)
    fact()
    assert (len(broker.sent), broker.trouble) == (3, "")


def test_a_topic_that_refused_only_advice_is_no_trouble_once_nobody_writes_to_it(broker: Broker) -> None:
    """An idle worker would not be ready after the grant: no status comes that asks again."""
    broker.status()
    broker.deliver(0, NO_RIGHT)
    broker.seconds += AGAIN_S
    assert "needs WRITE" in broker.trouble
    broker.seconds += UNASKED_S
    assert broker.trouble == ""
    broker.status(done=True)
    broker.deliver(1, NO_RIGHT)
    broker.seconds += AGAIN_S + UNASKED_S
    assert "refuses 1 records" in broker.trouble


def test_a_partition_that_is_gone_holds_up_no_other_record_of_the_topic(broker: Broker) -> None:
    broker.republish(b"gone", 9)
    broker.deliver(0, NotFound("topic t does not exist"))
    broker.republish(b"other", None)
    assert [value for _, value, _ in broker.sent] == [b"gone", b"other"]
    broker.deliver(1)
    assert "refuses 1 records" in broker.trouble
    broker.tick()
    broker.deliver(2)
    assert broker.refused == []
    broker.assert_idle()


def test_what_nothing_can_make_smaller_waits_and_is_named(broker: Broker) -> None:
    broker.results("r1")
    broker.deliver(0, TooLarge("too large"))
    broker.deliver(1, TooLarge("the failure too"))
    assert "the failure too" in broker.trouble
    broker.tick()
    broker.deliver(2)
    assert (broker.done, broker.trouble) == (["too_large"], "")


def test_a_dead_letter_that_is_too_large_or_in_words_that_cannot_be_encoded_is_still_sent(broker: Broker) -> None:
    broker.refuse = [TooLarge("too large")]
    broker.letter("large", original=b"y" * 200_000, original_key=b"k" * 900_000)
    broker.letter("odd", reason="\ud800", error_chain=["\ud800"])
    large, odd = (broker.read(index, DeadLetter) for index in range(2))
    assert (large.original, large.original_key, odd.original) == (b"y" * 65536, None, b"y")
    assert "200000 bytes" in large.reason
    broker.deliver(0)
    broker.deliver(1)
    assert broker.done == ["large", "odd"]


def test_while_nothing_is_under_way_a_record_leaves_at_once_and_then_others_gather() -> None:
    broker = Broker(gathers=True)
    broker.results("a", "b", "c")
    assert (broker.ids(), broker.publisher.backlog) == (["a"], 2)
    broker.due.pop()()
    assert (broker.ids(), broker.publisher.backlog) == (["a", "b", "c"], 0)


def test_what_gathered_leaves_when_the_last_answer_comes_or_enough_is_there() -> None:
    broker = Broker(gathers=True)
    broker.results("a", "b")
    broker.deliver(0)
    assert broker.ids() == ["a", "b"]
    assert not broker.due
    broker.results(*map(str, range(GATHERED_RECORDS)))
    assert len(broker.sent) == 2 + GATHERED_RECORDS


def test_a_flood_of_dead_letters_has_a_small_window_and_results_pass_it(broker: Broker) -> None:
    names = [str(number) for number in range(5000)]
    for name in names:
        broker.letter(name)
    assert len(broker.sent) == LETTER_WINDOW
    broker.results("result")
    assert broker.sent[LETTER_WINDOW][0] == NAMES.result
    for index in range(5001):
        broker.deliver(index)
    assert sorted(broker.done) == sorted(["result", *names])
    broker.assert_idle()


def test_a_status_on_the_way_is_advice_and_the_one_that_ends_a_request_is_never_lost(broker: Broker) -> None:
    """Whatever its detail holds and whatever the broker says: unencodable, refused, too large, lost on the way."""
    broker.refuse = [FULL]
    broker.status()
    assert broker.publisher.backlog == 0
    broker.status(done=True, detail="\ud800")
    assert broker.read(0, StatusEvent).detail is None
    broker.refuse = [FULL, TooLarge("too large")]
    broker.status(done=True, detail="x" * 5000)
    assert broker.publisher.backlog == 1
    broker.tick()
    assert broker.read(1, StatusEvent).detail is None
    broker.deliver(1, TIMED_OUT)
    broker.tick()
    broker.deliver(2)
    broker.deliver(0)
    broker.assert_idle()


@pytest.mark.parametrize("at_once", [True, False])
def test_a_record_that_is_too_large_to_be_moved_is_told(broker: Broker, at_once: bool) -> None:
    """Its header grows by its origin. Nobody heard of it, so that its offset was never committed."""
    if at_once:
        broker.refuse = [TooLarge("beyond the limit")]
    broker.republish(b"x", 1)
    if not at_once:
        broker.deliver(0, TooLarge("beyond the limit"))
    assert [error.code for error in broker.refused] == ["too_large"]
    broker.assert_idle()
