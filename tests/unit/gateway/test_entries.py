"""Frames for a subscriber from any cursor at any time: they add up to the result, and the end comes last, once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kit.gateway_records import ORIGIN, chunk, outcome, request, status
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import ChunkFrame, Frame, RestartedFrame, ResultFrame, SnapshotFrame, StatusFrame
from penstock.gateway.view.rows import facts_text, restored, snapshot
from penstock.schemas.cursor import Cursor, decode_cursor
from penstock.schemas.errors import ExecutionTimeout, InvalidCursor, to_error_record
from penstock.schemas.fold import Chunk, ResultFold
from penstock.schemas.records import ResultEvent

REQUEST = request(stream=True, created_at=1_000)


def end(text: str, **place: Any) -> ResultEvent:
    return outcome(text_generation={"text": text}, **place)


def claim(**place: int) -> ResultEvent:
    return chunk(**place)


SINCE = {"since_epoch": 1, "since_attempt": 1}

# Logs of a request, each with the text of its outcome: plain, taken over with other text, retried, taken over by a
# worker that says the same, taken over before its first chunk, with a chunk that never came, without any chunk.
LOGS: dict[str, list[ResultEvent]] = {
    "plain": [chunk("ab", 0), chunk("cd", 2), chunk("ef", 4), end("abcdef")],
    "takeover": [chunk("ab", 0), chunk("cd", 2), chunk("xy", 0, epoch=2), chunk("z", 2, epoch=2), end("xyz", epoch=2)],
    "zombie": [chunk("ab", 0), chunk("xy", 0, epoch=2), chunk("cd", 2), end("abcd"), end("xy", epoch=2)],
    "retry": [chunk("ab", 0), chunk("uv", 0, attempt=2), end("uv", attempt=2)],
    "same-again": [chunk("ab", 0), chunk("ab", 0, epoch=2), chunk("c", 2, epoch=2), end("abc", epoch=2)],
    "ends-elsewhere": [chunk("ab", 0), chunk("cd", 2), end("abz", epoch=2)],
    "ends-elsewhere-alike": [chunk("ab", 0), chunk("cd", 2), end("abcde", epoch=2)],
    "ends-elsewhere-empty": [chunk("ab", 0), end("", epoch=2)],
    "gap": [chunk("ab", 0), chunk("ef", 4), chunk("gh", 6), end("abcdefgh")],
    "gap-after-takeover": [chunk("ab", 0), chunk("yz", 1, epoch=2), end("xyz", epoch=2)],
    "repeats": [chunk("ab", 0), chunk("ab", 0), chunk("bcd", 1), end("abcd"), end("abcd")],
    "goes-on": [chunk("ab", 0), chunk("cd", 2, attempt=2, **SINCE), end("abcd", attempt=2, **SINCE)],
    "goes-on-twice": [
        chunk("ab", 0),
        chunk("cd", 2, attempt=2, **SINCE),
        claim(epoch=2),
        chunk("ef", 4, epoch=2, **SINCE),
        end("abcdef", epoch=2, **SINCE),
    ],
    "zombie-behind-a-claim": [
        chunk("ab", 0),
        claim(epoch=2),
        chunk("xy", 2),
        end("abxy"),
        chunk("cd", 2, epoch=2, **SINCE),
        end("abcd", epoch=2, **SINCE),
    ],
    "claimed-and-begun-anew": [
        chunk("Hello wor", 0),
        claim(epoch=2),
        chunk("Goodbye cr", 0, epoch=2),
        chunk("uel world", 10, epoch=2),
        end("Goodbye cruel world", epoch=2),
    ],
    "claimed-and-ended": [chunk("ab", 0), claim(epoch=2), end("xyz", epoch=2)],
    "claimed-before-its-first-chunk": [claim(epoch=2), chunk("ab", 0, epoch=2), end("ab", epoch=2)],
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
    again = restored("default", "r", facts_text(snapshot(entry)), accepted_ms=entry.accepted_ms, erased=False)
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

    def copy(self) -> Reader:
        other = Reader()
        other.text, other.result, other.cursor = self.text, self.result, self.cursor
        return other

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
    """One reader follows all along; at each event another comes new, and all come back with the cursor they had."""
    log = LOGS[name]
    text = (next(event for event in reversed(log) if event.is_terminal).text_generation or {})["text"]
    entry = new_entry()
    away: list[Reader] = []  # those who left at some event with what they had
    following = [Reader()]
    following[0].take(entry.opening(None))
    for offset, event in enumerate(log):
        away += [reader.copy() for reader in following]
        frames = entry.frames_of(entry.on_result(event, offset))
        if restart:
            entry = after_restart(entry)
        for reader in following:
            reader.take(frames)
        newcomer = Reader()
        newcomer.take(entry.opening(None))
        if newcomer.result is None:
            following.append(newcomer)
        else:
            away.append(newcomer)
            assert newcomer.text == text
    for reader in following:
        assert reader.text == text
        assert reader.result is not None
        assert (reader.result.result or {})["text"] == text
    for reader in away:
        back = reader.copy()
        if back.result is not None:
            assert back.cursor is not None
            assert entry.is_behind(back.cursor)
            continue
        assert back.cursor is None or not entry.is_behind(back.cursor)
        back.take(entry.opening(back.cursor))
        assert back.text == text
        assert back.result is not None
        assert back.cursor is not None
        assert entry.is_behind(back.cursor)


@pytest.mark.parametrize("name", LOGS)
def test_coming_back_in_the_middle(name: str) -> None:
    """A cursor from any event, given at any later event, and followed to the end."""
    log = LOGS[name]
    text = (next(event for event in reversed(log) if event.is_terminal).text_generation or {})["text"]
    for leave in range(len(log)):
        for come_back in range(leave, len(log)):
            entry, reader = new_entry(), Reader()
            reader.take(entry.opening(None))
            for offset, event in enumerate(log):
                if offset == come_back and reader.result is None:
                    reader.take(entry.opening(reader.cursor))
                frames = entry.frames_of(entry.on_result(event, offset))
                if not leave <= offset < come_back:
                    reader.take(frames)
            assert reader.text == text
            assert reader.result is not None


@pytest.mark.parametrize("name", LOGS)
def test_a_request_without_streaming_gets_the_whole_result(name: str) -> None:
    entry = new_entry(stream=False)
    frames = [
        frame for offset, event in enumerate(LOGS[name]) for frame in entry.frames_of(entry.on_result(event, offset))
    ]
    assert isinstance(frames[-1], ResultFrame)
    assert sum(isinstance(frame, ResultFrame) for frame in frames) == 1
    assert [type(frame) for frame in entry.opening(None)] == [ResultFrame]


def test_a_cursor_ahead_of_the_view_gets_a_snapshot() -> None:
    """This gateway is behind the one that made the cursor."""
    entry = new_entry()
    entry.on_result(chunk("ab", 0), 0)
    for ahead in (
        Cursor(partition=3, offset=9, epoch=2, attempt=1, text_length=1),
        Cursor(partition=3, offset=9, epoch=1, attempt=1, text_length=5),
    ):
        frames = entry.opening(ahead)
        assert [type(frame) for frame in frames] == [StatusFrame, SnapshotFrame]
        assert not entry.is_behind(ahead)
        reader = Reader()
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


def test_a_failure_is_reported_with_its_error() -> None:
    entry = new_entry()
    entry.on_result(chunk("ab", 0), 0)
    error = to_error_record(ExecutionTimeout("too slow"))
    frames = entry.frames_of(entry.on_result(outcome(status="failed", error=error), 1))
    assert [type(frame) for frame in frames] == [ResultFrame]
    body = frames[0].to_json()
    assert (body["status"], body["done"], body["result"]) == ("failed", True, None)
    assert body["error"]["code"] == "execution_timeout"
    public = entry.to_json()
    assert (public["status"], public["done"], public["error"]["code"]) == ("failed", True, "execution_timeout")
    assert public["created_at"] == "1970-01-01T00:00:01.000Z"
    again = after_restart(entry)
    assert again.to_json() == public
    assert [frame.to_json() for frame in again.opening(None)] == [body]


def test_the_first_origin_stays() -> None:
    entry = new_entry()
    content = entry.content
    other = replace(ORIGIN, offset=8)
    entry.on_request(replace(REQUEST, priority=1), other)
    assert (entry.priority, entry.content, entry.origin) == (5, content, ORIGIN)


@pytest.mark.parametrize(
    ("place", "counts"),
    [({"offset": 6}, True), ({"offset": 8}, False), ({"offset": 6, "partition": 1}, False), ({"topic": "s"}, False)],
)
def test_an_earlier_record_of_the_same_log_counts(place: dict[str, Any], counts: bool) -> None:
    entry = new_entry()
    entry.model = "of the first"
    entry.on_request(replace(REQUEST, model="of the other"), replace(ORIGIN, **place))
    assert entry.model == ("of the other" if counts else "of the first")
    assert (entry.origin == ORIGIN) != counts


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


def test_a_reader_of_a_continued_text_gets_the_rest_also_after_the_end() -> None:
    entry = new_entry()
    (first,) = entry.frames_of(entry.on_result(chunk("Hello wor", 0), 10))
    entry.on_result(chunk("ld", 9, attempt=2, **SINCE), 11)
    entry.on_result(end("Hello world", attempt=2, **SINCE), 12)
    after = decode_cursor(first.cursor or "")
    for _ in range(2):
        told = [frame for frame in entry.opening(after) if isinstance(frame, ChunkFrame | RestartedFrame)]
        assert [frame.text for frame in told if isinstance(frame, ChunkFrame)] == ["ld"]
        assert len(told) == 1
        entry.forget_text()


def test_a_text_that_was_read_again_before_its_claim_was_kept_or_void() -> None:
    """The claim was passed over, a client came, and then the worker began anew."""
    passed, read_again = ResultFold("r", "default"), ResultFold("r", "default")
    for event in (chunk("Hello wor", 0), claim(epoch=2)):
        passed.pass_over(event)
        read_again.apply(event)
    passed.hold_text_of(read_again)
    step = passed.apply(chunk("Goodbye", 0, epoch=2))
    assert isinstance(step, Chunk)
    assert step.restarted
    assert passed.text == "Goodbye"
