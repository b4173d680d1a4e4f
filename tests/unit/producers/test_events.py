"""The events of a follow: order, restarts and the end; the chunks always make up the result."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import chunk, status
from kit.records import outcome as terminal
from penstock.common.reader import RawMessage
from penstock.producers.events import Chunk, Event, EventFold, Restarted, Result, Status, completed
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import Cancelled, ContextLengthExceeded, DeadLettered, Expired, InternalError
from penstock.schemas.records import ErrorInfo, Record, ResultEvent, StatusEvent
from penstock.schemas.topics import TopicNames

NAMES = TopicNames("p-")


def outcome(text: str | None, **facts: Any) -> ResultEvent:
    return terminal(text_generation=None if text is None else {"text": text}, **facts)


def fold(*records: Record | bytes | None) -> list[Event]:
    folded = EventFold("r", "default", NAMES, default_codec())
    events: list[Event] = []
    for offset, record in enumerate(records):
        topic = NAMES.status if isinstance(record, StatusEvent) else NAMES.result
        value = default_codec().encode(record) if isinstance(record, Record) else record
        events += folded.apply(RawMessage(topic, 0, offset, 0, b"r", value))
    return events


def joined(events: list[Event]) -> str:
    text = ""
    for event in events:
        if isinstance(event, Restarted):
            text = ""
        elif isinstance(event, Chunk):
            assert event.text_offset == len(text)
            text += event.text
    return text


def test_log_probabilities_come_with_their_text() -> None:
    tokens = [{"token": "He", "logprob": -0.5, "bytes": None, "top_logprobs": None}]
    (event,) = fold(chunk("He", 0, token_logprobs=tokens, first_logprob_index=0))
    assert isinstance(event, Chunk)
    assert event.logprobs == tokens


@pytest.mark.parametrize(
    ("records", "kinds", "text"),
    [
        ([chunk("old", 0), chunk("new", 0, attempt=2), outcome("new text", attempt=2)], "CRCCE", "new text"),
        ([chunk("abc", 0), outcome("xyz", attempt=2)], "CRCE", "xyz"),
        ([status("completed"), outcome("a"), status("running")], "CE", "a"),
        ([outcome("a"), chunk("zombie", 0, epoch=9)], "CE", "a"),
        ([status("running"), status("queued"), outcome("a")], "SCE", "a"),
        ([b"garbage", None, status("queued"), outcome(None, status="failed")], "SE", ""),
        ([chunk("theirs", 0, tenant="other"), outcome("ours")], "CE", "ours"),
    ],
    ids=[
        "a new attempt restarts", "an outcome that contradicts the chunks restarts",
        "a terminal status is not an event, and nothing follows the result", "a zombie after the result",
        "a status never goes back", "what holds no record is skipped", "another tenant's events are not seen",
    ],
)  # fmt: skip
def test_folds(records: list[Record | bytes | None], kinds: str, text: str) -> None:
    """C: a chunk, R: restarted, S: a status, E: the result."""
    events = fold(*records)
    letters = {Chunk: "C", Restarted: "R", Status: "S", Result: "E"}
    assert ("".join(letters[type(event)] for event in events), joined(events)) == (kinds, text)


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
        completed(outcome(None, status=ended, error=info))
    assert completed(outcome("a")).output_text == "a"


def test_an_event_shows_in_one_line_what_it_says() -> None:
    assert repr(Status(status="running", attempt=1, model="m")) == "Status(status='running', attempt=1, model='m')"
    assert repr(Chunk(text="He", text_offset=0, attempt=1)) == "Chunk(text='He', text_offset=0, attempt=1)"
    said = Result(outcome("Hello", finish_reason="stop", model="m"))
    assert repr(said) == "Result(status='completed', text='Hello', finish_reason='stop', model='m')"
    vectors = Result(terminal(task="embedding", embedding={"embeddings": [[0.5] * 1_024]}))
    assert "embeddings" in repr(vectors)
    assert len(repr(vectors)) < 300
    failed = Result(outcome(None, status="expired", error=ErrorInfo(code="expired", message="too late", type="x")))
    assert repr(failed) == "Result(status='expired', error='expired: too late')"
