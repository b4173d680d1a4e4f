"""The events of a follow: order, restarts, the end, and the law that the chunks make up the result."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.reader import RawMessage
from penstock.producers.events import Chunk, Event, EventFold, Restarted, Result, Status, completed
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import Cancelled, ContextLengthExceeded, DeadLettered, Expired, InternalError
from penstock.schemas.records import ErrorInfo, Origin, Record, ResultEvent, StatusEvent
from penstock.schemas.topics import TopicNames

NAMES = TopicNames("p-")
ORIGIN = Origin(topic="p-inference.request.medium", partition=0, offset=7, append_time_ms=1)


def chunk(text: str, offset: int, *, attempt: int = 1, epoch: int = 1, request_id: str = "r") -> ResultEvent:
    return ResultEvent(
        request_id=request_id,
        tenant="default",
        kind="chunk",
        origin=ORIGIN,
        attempt=attempt,
        epoch=epoch,
        task="text_generation",
        created_at=1,
        worker_id="w",
        text=text,
        text_offset=offset,
    )


def outcome(text: str | None, *, status: str = "completed", attempt: int = 1, epoch: int = 1) -> ResultEvent:
    return dataclasses.replace(
        chunk("", 0, attempt=attempt, epoch=epoch),
        kind="terminal",
        text=None,
        text_offset=None,
        status=status,
        text_generation=None if text is None else {"text": text},
    )


def status(name: str, rank: int, *, done: bool = False) -> StatusEvent:
    return StatusEvent(
        request_id="r",
        tenant="default",
        status=name,
        done=done,
        rank=rank,
        attempt=1,
        epoch=1,
        origin=ORIGIN,
        worker_id="w",
        created_at=1,
    )


def fold(*records: Record | bytes) -> list[Event]:
    folded = EventFold("r", "default", NAMES, default_codec())
    events: list[Event] = []
    for offset, record in enumerate(records):
        topic = NAMES.status if isinstance(record, StatusEvent) else NAMES.result
        value = record if isinstance(record, bytes) else default_codec().encode(record)
        events += folded.apply(RawMessage(topic, 0, offset, 0, b"r", value))
    return events


def kinds(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def joined(events: list[Event]) -> str:
    text = ""
    for event in events:
        if isinstance(event, Restarted):
            text = ""
        elif isinstance(event, Chunk):
            assert event.text_offset == len(text)
            text += event.text
    return text


def test_statuses_chunks_and_the_result_come_in_order() -> None:
    events = fold(status("queued", 10), status("running", 40), chunk("He", 0), chunk("llo", 2), outcome("Hello"))
    assert kinds(events) == ["Status", "Status", "Chunk", "Chunk", "Result"]
    assert events[0] == Status(status="queued", attempt=1)
    assert joined(events) == "Hello"


def test_nothing_comes_after_the_result_and_a_terminal_status_is_not_told() -> None:
    events = fold(status("completed", 100, done=True), outcome("a"), status("running", 40), chunk("zombie", 0, epoch=9))
    assert kinds(events) == ["Chunk", "Result"]


def test_a_status_never_goes_back() -> None:
    assert kinds(fold(status("running", 40), status("queued", 10))) == ["Status"]


def test_log_probabilities_come_with_their_text() -> None:
    tokens = [{"token": "He", "logprob": -0.5, "bytes": None, "top_logprobs": None}]
    (event,) = fold(dataclasses.replace(chunk("He", 0), token_logprobs=tokens, first_logprob_index=0))
    assert isinstance(event, Chunk)
    assert event.logprobs == tokens


def test_a_new_attempt_says_restarted() -> None:
    events = fold(chunk("old", 0), chunk("new", 0, attempt=2), outcome("new text", attempt=2))
    assert kinds(events) == ["Chunk", "Restarted", "Chunk", "Chunk", "Result"]
    assert joined(events) == "new text"


def test_an_outcome_that_contradicts_the_chunks_restarts() -> None:
    events = fold(chunk("abc", 0), outcome("xyz", attempt=2))
    assert kinds(events) == ["Chunk", "Restarted", "Chunk", "Result"]
    assert joined(events) == "xyz"


def test_what_does_not_decode_and_tombstones_are_passed_over() -> None:
    folded = EventFold("r", "default", NAMES, default_codec())
    assert folded.apply(RawMessage(NAMES.result, 0, 0, 0, b"r", None)) == []
    assert kinds(fold(b"garbage", status("queued", 10), outcome(None, status="failed"))) == ["Status", "Result"]


def test_foreign_events_under_the_same_id_are_not_seen() -> None:
    foreign = dataclasses.replace(chunk("theirs", 0), tenant="other")
    assert kinds(fold(foreign, outcome("ours"))) == ["Chunk", "Result"]


@given(
    attempts=st.lists(st.text(max_size=12), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    dropped=st.sets(st.integers(0, 30)),
    doubled=st.sets(st.integers(0, 30)),
)
def test_chunks_always_make_up_the_result(
    attempts: list[str], cuts: list[int], dropped: set[int], doubled: set[int]
) -> None:
    records: list[Record] = []
    for number, text in enumerate(attempts, 1):
        step = cuts[number % len(cuts)]
        for at in range(0, len(text), step):
            made = chunk(text[at : at + step], at, attempt=number)
            index = len(records)
            records += [] if index in dropped and number == len(attempts) else [made]
            records += [made] if index in doubled else []
    events = fold(*records, outcome(attempts[-1], attempt=len(attempts)))
    assert joined(events) == attempts[-1]
    assert isinstance(events[-1], Result)


@pytest.mark.parametrize(
    ("ended", "error", "expected"),
    [
        ("failed", "context_length_exceeded", ContextLengthExceeded),
        ("failed", "never_heard_of", InternalError),
        ("failed", None, InternalError),
        ("cancelled", None, Cancelled),
        ("expired", None, Expired),
        ("dead_lettered", None, DeadLettered),
    ],
)
def test_a_failed_outcome_raises_its_error(ended: str, error: str | None, expected: type[Exception]) -> None:
    info = None if error is None else ErrorInfo(code=error, message="why", type="t")
    with pytest.raises(expected):
        completed(dataclasses.replace(outcome(None, status=ended), error=info))
    assert completed(outcome("a")).output_text == "a"
