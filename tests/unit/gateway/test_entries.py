"""Frames for a subscriber from any cursor at any time: they add up to the result, and the end comes last, once."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from kit.records import ORIGIN, chunk, claim, outcome, request, status
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import ChunkFrame, Frame, RestartedFrame, ResultFrame, SnapshotFrame, StatusFrame
from penstock.gateway.view.rows import restored, row_of, snapshot
from penstock.schemas.cursor import Cursor, decode_cursor
from penstock.schemas.errors import InvalidCursor
from penstock.schemas.fold import Chunk, ResultFold
from penstock.schemas.records import ResultEvent

REQUEST = request(stream=True, created_at=1_000)
SINCE = {"since_epoch": 1, "since_attempt": 1}


def end(text: str, epoch: int = 1, **fields: Any) -> ResultEvent:
    return outcome(text_generation={"text": text}, epoch=epoch, **fields)


def chunks(*texts: str, at: int = 0, **fields: Any) -> list[ResultEvent]:
    """Each behind the one before."""
    return [chunk(text, at + sum(map(len, texts[:number])), **fields) for number, text in enumerate(texts)]


ON2 = {"epoch": 2, **SINCE}
LOGS: dict[str, list[ResultEvent]] = {
    "plain": [*chunks("ab", "cd", "ef"), end("abcdef")],
    "takeover": [*chunks("ab", "cd"), *chunks("xy", "z", epoch=2), end("xyz", 2)],
    "zombie": [chunk("ab", 0), chunk("xy", 0, epoch=2), chunk("cd", 2), end("abcd"), end("xy", 2)],
    "same-again": [chunk("ab", 0), *chunks("ab", "c", epoch=2), end("abc", 2)],
    "ends-elsewhere": [*chunks("ab", "cd"), end("abz", 2)],
    "ends-elsewhere-alike": [*chunks("ab", "cd"), end("abcde", 2)],
    "ends-elsewhere-empty": [chunk("ab", 0), end("", 2)],
    "gap": [chunk("ab", 0), *chunks("ef", "gh", at=4), end("abcdefgh")],
    "gap-after-takeover": [chunk("ab", 0), chunk("yz", 1, epoch=2), end("xyz", 2)],
    "repeats": [chunk("ab", 0), chunk("ab", 0), chunk("bcd", 1), end("abcd"), end("abcd")],
    "goes-on": [chunk("ab", 0), chunk("cd", 2, attempt=2, **SINCE), end("abcd", attempt=2, **SINCE)],
    "goes-on-twice": [
        chunk("ab", 0),
        chunk("cd", 2, attempt=2, **SINCE),
        claim(epoch=2),
        chunk("ef", 4, **ON2),
        end("abcdef", **ON2),
    ],
    "zombie-behind-a-claim": [
        chunk("ab", 0),
        claim(epoch=2),
        chunk("xy", 2),
        end("abxy"),
        chunk("cd", 2, **ON2),
        end("abcd", **ON2),
    ],
    "claimed-and-begun-anew": [
        chunk("Hello wor", 0),
        claim(epoch=2),
        *chunks("Goodbye cr", "uel world", epoch=2),
        end("Goodbye cruel world", 2),
    ],
    "claimed-and-ended": [chunk("ab", 0), claim(epoch=2), end("xyz", 2)],
    "claimed-before-its-first-chunk": [claim(epoch=2), chunk("ab", 0, epoch=2), end("ab", 2)],
    "at-once": [end("abc")],
    "empty": [end("")],
    "beyond-ascii": [chunk("ä😀", 0), chunk("e\u0301", 2), end("ä😀e\u0301!")],
}


def new_entry(*, stream: bool = True) -> Entry:
    entry = Entry("default", "r", 3)
    entry.on_request(replace(REQUEST, stream=stream), ORIGIN)
    return entry


def after_restart(entry: Entry) -> Entry:
    """As the store brings it back, and as it is once its outcome or its pieces were read again."""
    again = restored(row_of(snapshot(entry)))
    if entry.terminal is not None:
        again.hold_outcome(entry.terminal, entry.large, 0)
    else:
        again.hold_text_of(entry.fold)
    return again


class Reader:
    """Puts frames together as a client does, and holds them to the rules."""

    def __init__(self) -> None:
        self.text = ""
        self.result: ResultFrame | None = None
        self.cursor: Cursor | None = None

    def take(self, frames: list[Frame]) -> None:
        for frame in frames:
            assert self.result is None, "something follows the outcome"
            match frame:
                case ChunkFrame():
                    assert frame.text
                    assert frame.offset == len(self.text), "a gap or a repeat"
                    self.text += frame.text
                case RestartedFrame():
                    self.text = ""
                case SnapshotFrame():
                    self.text = frame.text
                case ResultFrame():
                    self.result = frame
                case _:
                    assert isinstance(frame, StatusFrame)
            assert frame.cursor is not None
            self.cursor = decode_cursor(frame.cursor)
            assert self.cursor.partition == 3
            if not isinstance(frame, StatusFrame):
                assert self.cursor.text_length == len(self.text), "the cursor is not where its reader is"


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("restart", [False, True])
def test_every_reader_gets_the_result_from_any_position(name: str, restart: bool) -> None:
    """At each event some leave, one comes new, and all who left before come back with the cursor they had."""
    log = LOGS[name]
    text = (next(event for event in reversed(log) if event.is_terminal).text_generation or {})["text"]
    entry, following, away = new_entry(), [Reader()], list[Reader]()
    following[0].take(entry.opening(None))
    for offset, event in enumerate(log):
        away += [copy.copy(reader) for reader in following]
        frames = entry.frames_of(entry.on_result(event, offset))
        if restart:
            entry = after_restart(entry)
        for reader in following:
            reader.take(frames)
        coming = [Reader(), *(copy.copy(reader) for reader in away if reader.result is None)]
        for reader in coming:
            assert reader.cursor is None or not entry.is_behind(reader.cursor)
            reader.take(entry.opening(reader.cursor))
        following += coming
    for reader in following:
        assert reader.text == text
        assert reader.result is not None
        assert reader.cursor is not None
        assert (reader.result.result or {})["text"] == text
        assert entry.is_behind(reader.cursor)


@pytest.mark.parametrize("name", LOGS)
def test_a_request_without_streaming_gets_the_whole_result(name: str) -> None:
    entry = new_entry(stream=False)
    frames = [one for offset, event in enumerate(LOGS[name]) for one in entry.frames_of(entry.on_result(event, offset))]
    assert [isinstance(frame, ResultFrame) for frame in frames] == [*[False] * (len(frames) - 1), True]
    assert [type(frame) for frame in entry.opening(None)] == [ResultFrame]


@pytest.mark.parametrize("ahead", [{"epoch": 2, "text_length": 1}, {"epoch": 1, "text_length": 5}])
def test_a_cursor_ahead_of_the_view_gets_a_snapshot(ahead: dict[str, int]) -> None:
    entry, reader = new_entry(), Reader()
    entry.on_result(chunk("ab", 0), 0)
    cursor = Cursor(partition=3, offset=9, attempt=1, **ahead)
    frames = entry.opening(cursor)
    assert [type(frame) for frame in frames] == [StatusFrame, SnapshotFrame]
    assert not entry.is_behind(cursor)
    reader.take(frames)
    assert reader.text == "ab"


def test_statuses() -> None:
    entry = new_entry()
    assert [frame.to_json()["status"] for frame in entry.opening(None)] == ["accepted"]
    assert [frame.to_json()["position"] for frame in entry.on_status(status("queued", position=2))] == [2]
    assert entry.on_status(status("queued", position=2)) == []
    assert len(entry.on_status(status("queued", position=1))) == 1
    assert len(entry.on_status(status("running"))) == 1
    assert entry.on_status(status("queued")) == []
    assert entry.on_status(status("completed")) == [], "the end is told by the result topic"
    assert [frame.to_json()["status"] for frame in after_restart(entry).opening(None)] == ["running"]
    entry.on_result(chunk("a", 0, epoch=2), 0)
    assert entry.on_status(status("retrying")) == [], "a zombie's"
    entry.on_result(end("a", epoch=2), 1)
    assert entry.on_status(status("running", epoch=3)) == []


def test_a_cursor_of_another_request_is_refused() -> None:
    entry = Entry("default", "r1", 3)
    entry.check_cursor(None)
    entry.check_cursor(Cursor(partition=3, offset=1, epoch=1, attempt=1, text_length=0))
    with pytest.raises(InvalidCursor):
        entry.check_cursor(Cursor(partition=2, offset=1, epoch=1, attempt=1, text_length=0))


def test_a_resumed_stream_repeats_the_log_probabilities_that_may_be_missing() -> None:
    entry = new_entry()

    def scored(text: str, at: int, names: str, first: int) -> ResultEvent:
        tokens = [{"token": name, "logprob": -1.0, "bytes": None, "top_logprobs": None} for name in names]
        return replace(chunk(text, at), token_logprobs=tokens, first_logprob_index=first)

    def told(frame: Frame) -> tuple[str, str, int]:
        assert isinstance(frame, ChunkFrame)
        shown = frame.to_json()
        tokens = "".join(one["token"] for one in shown.get("logprobs", ()))
        return shown["text"], tokens, shown.get("logprobs_offset", 0)

    (first,) = entry.frames_of(entry.on_result(scored("ab", 0, "ab", 0), 10))
    (second,) = entry.frames_of(entry.on_result(scored("", 2, "c", 2), 11))
    entry.frames_of(entry.on_result(scored("cd", 2, "d", 3), 12))
    assert [told(first), told(second)] == [("ab", "ab", 0), ("", "c", 2)]
    assert told(entry.opening(None)[-1]) == ("abcd", "abcd", 0)
    for frame in (first, second):  # their cursors say how much of the text is known
        assert told(entry.opening(decode_cursor(frame.cursor or ""))[-1]) == ("cd", "cd", 2)
    assert "logprobs" not in entry.chunk_frame("x", 4).to_json()


def test_a_text_that_was_read_again_before_its_claim_was_kept_or_void() -> None:
    passed, read_again = ResultFold("r", "default"), ResultFold("r", "default")
    for event in (chunk("Hello wor", 0), claim(epoch=2)):
        passed.pass_over(event)
        read_again.apply(event)
    passed.hold_text_of(read_again)
    step = passed.apply(chunk("Goodbye", 0, epoch=2))
    assert isinstance(step, Chunk)
    assert step.restarted
    assert passed.text == "Goodbye"
