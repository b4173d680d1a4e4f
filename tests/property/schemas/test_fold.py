"""The fold over everything that can stand on a result topic: zombies, repeats, takeovers, another origin's events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from kit.records import chunk as result_event
from kit.records import status as status_event
from penstock.schemas.fold import IGNORED, Chunk, Ignored, ResultFold, StatusFold, Terminal
from penstock.schemas.records import STATUS_RANKS, Origin, ResultEvent, StatusEvent

ORIGIN = Origin(topic="t", partition=0, offset=7, append_time_ms=1)
OTHER = Origin(topic="t", partition=1, offset=3, append_time_ms=1)


def event(kind: str, origin: Origin, epoch: int, attempt: int, **values: object) -> ResultEvent:
    place: dict[str, Any] = {"origin": origin, "epoch": epoch, "attempt": attempt}
    return result_event(**{"text": None, "text_offset": None, "kind": kind, **place, **values})


def chunk(epoch: int, attempt: int, text: str, at: int, **values: object) -> ResultEvent:
    return event("chunk", ORIGIN, epoch, attempt, text=text, text_offset=at, **values)


@pytest.fixture
def fold() -> ResultFold:
    return ResultFold("r", "default")


@st.composite
def writers(draw: st.DrawFn, origin: Origin, epoch: int, attempt: int) -> list[ResultEvent]:
    """What one worker writes in one attempt: contiguous chunks, perhaps the end. The text names its writer."""
    pieces = draw(st.lists(st.text("abc", min_size=1, max_size=3), max_size=5))
    text, at, events = "", 0, []
    for number, piece in enumerate(pieces):
        piece = f"{epoch}{attempt}{piece}"
        values = {"text": piece, "text_offset": at, "first_token_index": number, "token_ids": [number]}
        events.append(event("chunk", origin, epoch, attempt, **values))
        if draw(st.booleans()):
            events.append(event("preview", origin, epoch, attempt))
        text, at = text + piece, at + len(piece)
    if draw(st.booleans()):
        output = {"text": text, "tool_calls": None}
        events.append(event("terminal", origin, epoch, attempt, status="completed", text_generation=output))
    return events


@st.composite
def logs(draw: st.DrawFn) -> list[ResultEvent]:
    """The writers' events interleaved, each writer's in order, any event once more (a producer's retry)."""
    places = [(ORIGIN, 1, 1), (ORIGIN, 1, 2), (ORIGIN, 2, 1), (ORIGIN, 2, 2), (OTHER, 3, 1)]
    queues = [draw(writers(*place)) for place in draw(st.lists(st.sampled_from(places), min_size=1, unique=True))]
    queues.append([event("preview", ORIGIN, 1, 1)])
    log: list[ResultEvent] = []
    while any(queues):
        queue = draw(st.sampled_from([queue for queue in queues if queue]))
        log.append(queue.pop(0))
        if draw(st.integers(0, 4)) == 0:
            log.append(draw(st.sampled_from(log)))
    return log


def steps(log: list[ResultEvent]) -> tuple[ResultFold, list[Ignored | Chunk | Terminal]]:
    fold = ResultFold("r", "default")
    return fold, [fold.apply(found, offset) for offset, found in enumerate(log)]


@settings(max_examples=examples(300), deadline=None)
@given(log=logs())
def test_one_terminal_and_text_without_gap_or_repeat(log: list[ResultEvent]) -> None:
    fold, found = steps(log)
    first = log[0].origin
    seen, place, highest, ended = "", (-1, 0), (-1, 0), False
    for number, (step, read) in enumerate(zip(found, log, strict=True)):
        if read.origin == first:
            highest = max(highest, (read.epoch, read.attempt))
        if isinstance(step, Ignored):
            continue
        assert not ended, "something follows the outcome"
        assert read.origin == first, "an event of another origin was taken"
        assert (read.epoch, read.attempt) == highest, "a zombie was heard"
        if isinstance(step, Terminal):
            ended = True
            assert fold.terminal is step.event
            continue
        assert read.kind == "chunk" or (step.restarted and not step.text)
        assert step.restarted == ((step.epoch, step.attempt) > place and bool(seen))
        place = (step.epoch, step.attempt)
        seen = "" if step.restarted else seen
        assert step.text_offset == len(seen)
        seen += step.text
        whole = ""
        for other in log[: number + 1]:  # what this writer has written so far, each chunk once
            if (other.origin, other.epoch, other.attempt, other.kind) == (first, *place, "chunk"):
                whole = whole if other.text_offset != len(whole) else whole + (other.text or "")
        assert whole.startswith(seen) or seen == whole
    assert sum(isinstance(step, Terminal) for step in found) == ended
    assert fold.text == seen
    assert fold.text_length == len(seen)


@settings(max_examples=examples(150), deadline=None)
@given(log=logs())
def test_the_highest_place_is_shown(log: list[ResultEvent]) -> None:
    """Without an outcome, the text is the whole text of the highest (epoch, attempt) that wrote anything at all."""
    log = [found for found in log if found.kind != "terminal"]
    if not log:
        return
    fold, _ = steps(log)
    own = [found for found in log if found.origin == log[0].origin]
    highest = max((found.epoch, found.attempt) for found in own)
    texts = {f.text_offset: f.text for f in own if (f.epoch, f.attempt) == highest and f.kind == "chunk"}
    assert fold.text == "".join(texts[at] or "" for at in sorted(texts, key=lambda at: at or 0))
    assert fold.token_count == len(texts)


@settings(max_examples=examples(150), deadline=None)
@given(log=logs(), data=st.data())
def test_reading_again_changes_nothing(log: list[ResultEvent], data: st.DataObject) -> None:
    fold, _ = steps(log)
    before = (fold.text, fold.epoch, fold.attempt, fold.terminal, fold.restarts)
    for repeat in data.draw(st.lists(st.sampled_from(log), max_size=8)):
        assert fold.apply(repeat) == IGNORED
    assert before == (fold.text, fold.epoch, fold.attempt, fold.terminal, fold.restarts)


@settings(max_examples=examples(100), deadline=None)
@given(log=logs(), cut=st.integers(0, 30))
def test_a_restored_fold_goes_on_alike(log: list[ResultEvent], cut: int) -> None:
    log = [found for found in log if found.kind != "terminal" or found is log[-1]]
    whole, _ = steps(log)
    first, _ = steps(log[:cut])
    if first.terminal is not None:
        return
    again = ResultFold("r", "default")
    again.restore(
        origin=first.origin, epoch=first.epoch, attempt=first.attempt, text=first.text, token_count=first.token_count
    )
    for found in log[cut:]:
        again.apply(found)
    state = (whole.text, whole.epoch, whole.attempt, whole.terminal, whole.token_count)
    assert (again.text, again.epoch, again.attempt, again.terminal, again.token_count) == state


class Taker:
    """Claims a stream, reads what stands before its claim, and goes on or begins anew."""

    def __init__(self, log: list[ResultEvent], epoch: int, *, can_go_on: bool, claims: bool = True) -> None:
        self.log, self.epoch, self.can_go_on = log, epoch, can_go_on
        self.text = ""
        self.since: tuple[int, int] | None = None
        self.told = False
        """Whether readers have heard it."""
        if claims:
            log.append(event("chunk", ORIGIN, epoch, 1))
            fold, _ = steps(log)
            if can_go_on and fold.place == (epoch, 1) and not fold.gap and fold.text:
                self.text, self.since = fold.text, fold.since

    def says(self, word: str, *, end: bool = False) -> None:
        since = {} if self.since is None else {"since_epoch": self.since[0], "since_attempt": self.since[1]}
        values = {"text": word, "text_offset": len(self.text), **since}
        self.log.append(event("chunk", ORIGIN, self.epoch, 1, **values))
        self.text += word
        if end:
            output = {"text": self.text, "tool_calls": None}
            values = {"status": "completed", "text_generation": output, **since}
            self.log.append(event("terminal", ORIGIN, self.epoch, 1, **values))


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_what_was_told_stands_where_every_taker_goes_on(data: st.DataObject) -> None:
    """Workers that were thought dead go on writing; those that cannot go on say so."""
    log: list[ResultEvent] = []
    takers = [Taker(log, 1, can_go_on=True, claims=False)]
    for number in range(data.draw(st.integers(1, 14))):
        who = data.draw(st.sampled_from(["new", "newest", "zombie"]))
        if who == "new":
            takers.append(Taker(log, len(takers) + 1, can_go_on=data.draw(st.booleans())))
        else:
            taker = takers[-1] if who == "newest" else data.draw(st.sampled_from(takers))
            taker.says(f"{taker.epoch}.{number} ", end=taker is takers[-1] and data.draw(st.integers(0, 9)) == 0)
    fold, seen = ResultFold("r", "default"), ""
    for offset, read in enumerate(log):
        step = fold.apply(read, offset)
        if isinstance(step, Chunk):
            taker = takers[step.epoch - 1]
            assert step.restarted == (taker.since is None and not taker.told and bool(seen))
            taker.told = True
            seen = ("" if step.restarted else seen) + step.text
            assert not fold.gap
            assert taker.text.startswith(seen)
        elif isinstance(step, Terminal):
            text = step.event.output_text or ""
            assert text.startswith(seen) or step.event.since is None
            assert fold.since <= fold.place


AFTER_FIRST = {"since_epoch": 1, "since_attempt": 1}


def test_text_that_does_not_end_where_a_taker_goes_on_is_void(fold: ResultFold) -> None:
    fold.apply(chunk(1, 1, "abcd", 0))
    early = chunk(2, 1, "x", 3, **AFTER_FIRST)
    assert fold.apply(early) == Chunk(text="", text_offset=0, attempt=1, epoch=2, restarted=True)
    assert fold.gap
    fold.apply(chunk(2, 2, "ab", 0))
    assert isinstance(step := fold.apply(chunk(3, 1, "x", 0, **AFTER_FIRST)), Chunk)
    assert step.restarted, "it goes on from a text that is void"


def test_a_reader_that_lacks_text_lacks_it_still_when_another_worker_goes_on(fold: ResultFold) -> None:
    fold.apply(chunk(1, 1, "ab", 0))
    assert fold.apply(chunk(1, 1, "ef", 4)) is IGNORED
    assert fold.apply(chunk(2, 1, "gh", 6, **AFTER_FIRST)) is IGNORED
    assert (fold.text, fold.gap, fold.place, fold.since) == ("ab", True, (2, 1), (1, 1))


def test_a_zombie_is_not_heard_after_a_newer_preview(fold: ResultFold) -> None:
    fold.apply(chunk(1, 1, "ab", 0))
    restart = Chunk(text="", text_offset=0, attempt=1, epoch=2, restarted=True)
    assert fold.apply(event("preview", ORIGIN, 2, 1)) == restart
    assert fold.apply(chunk(1, 1, "cd", 2)) == IGNORED
    assert fold.apply(event("terminal", ORIGIN, 1, 1, status="completed")) == IGNORED
    step = fold.apply(chunk(2, 1, "xy", 0))
    assert step == Chunk(text="xy", text_offset=0, attempt=1, epoch=2, restarted=False)
    assert (fold.text, fold.restarts) == ("xy", 1)


def test_others_requests_and_gaps_are_ignored(fold: ResultFold) -> None:
    assert fold.apply(event("terminal", ORIGIN, 1, 1, tenant="other")) == IGNORED
    assert fold.apply(event("terminal", ORIGIN, 1, 1, request_id="s")) == IGNORED
    fold.apply(chunk(1, 1, "ab", 0))
    assert fold.apply(chunk(1, 1, "ef", 4)) == IGNORED
    step = fold.apply(chunk(1, 1, "bcd", 1))
    assert step == Chunk(text="cd", text_offset=2, attempt=1, epoch=1, restarted=False)
    assert fold.apply(event("UNKNOWN", ORIGIN, 1, 1)) == IGNORED


STATUSES = st.builds(
    status_event,
    st.sampled_from(sorted(STATUS_RANKS)),
    epoch=st.integers(1, 2),
    attempt=st.integers(1, 2),
    origin=st.sampled_from((ORIGIN, ORIGIN, ORIGIN, OTHER)),
)


@given(log=st.lists(STATUSES, min_size=1, max_size=20))
def test_statuses_only_rise_and_end_once(log: list[StatusEvent]) -> None:
    fold = StatusFold("r", "default")
    shown = [found for found in log if fold.apply(found)]
    places = [(found.epoch, found.attempt, found.rank) for found in shown]
    assert places == sorted(places)
    assert not any(found.done for found in shown[:-1])
    assert {found.origin for found in shown} == {log[0].origin}
    assert fold.latest is shown[-1]


def piece(index: int, arguments: str, offset: int) -> dict[str, object]:
    named = {"id": f"c{index}", "name": "f"} if offset == 0 else {"id": None, "name": None}
    return {"index": index, **named, "arguments": arguments, "offset": offset}


def test_pieces_of_calls_come_once_each_and_behind_no_gap(fold: ResultFold) -> None:
    def told(attempt: int, *pieces: dict[str, object]) -> list[tuple[object, object, object]]:
        step = fold.apply(chunk(1, attempt, "", 0, tool_call_pieces=[*pieces]))
        calls = step.calls if isinstance(step, Chunk) else []
        return [(one["index"], one["arguments"], one["offset"]) for one in calls]

    assert told(1, piece(0, "", 0), piece(0, "{a", 0)) == [(0, "", 0), (0, "{a", 0)]
    assert told(1, piece(0, "{a", 0)) == []
    assert told(1, piece(0, "a:1", 1), piece(1, "{}", 0)) == [(0, ":1", 2), (1, "{}", 0)]
    assert told(1, piece(0, "x", 9), piece(3, "{}", 0)) == []
    # Another attempt begins them anew, and says so although no text was there.
    step = fold.apply(chunk(1, 2, "", 0, tool_call_pieces=[piece(0, "{", 0)]))
    assert isinstance(step, Chunk)
    assert step.restarted
    assert [one["arguments"] for one in step.calls] == ["{"]
    assert told(1, piece(0, "{b", 0)) == []


def test_log_probabilities_come_once_each_and_behind_no_gap(fold: ResultFold) -> None:
    def told(text: str, at: int, names: str, first: int, attempt: int = 1, **since: int) -> tuple[str, int]:
        tokens = [{"token": name, "logprob": -1.0, "bytes": None, "top_logprobs": None} for name in names]
        more = {"token_logprobs": tokens, "first_logprob_index": first, **since}
        step = fold.apply(chunk(1, attempt, text, at, **more))
        assert isinstance(step, Chunk)
        return "".join(one["token"] for one in step.logprobs), step.logprobs_offset

    def known() -> list[int]:
        return [fold.logprobs.count_at(length) for length in range(fold.text_length + 1)]

    assert told("ab", 0, "ab", 0) == ("ab", 0)
    assert told("", 2, "c", 2) == ("c", 2)
    assert told("de", 2, "cde", 2) == ("de", 3)
    assert known() == [0, 0, 2, 2, 5]
    other = ResultFold("r", "default")
    other.epoch, other.attempt = fold.place
    other.hold_text_of(fold)
    # Another attempt goes on, and one begins anew.
    assert told("f", 4, "f", 5, 2, since_epoch=1, since_attempt=1) == ("f", 5)
    assert not fold.gap
    assert told("xy", 0, "xy", 0, 3) == ("xy", 0)
    assert known() == [0, 0, 2]
    assert told("z", 2, "z", 9, 3) == ("", 2)
    assert fold.gap
    assert [one["token"] for one in other.logprobs.tokens()] == [*"abcde"]


def test_tokens_without_text_are_void_when_another_text_begins() -> None:
    """Their log probabilities were told. Those of the new text came as if they followed them."""
    token = {"token": "a", "logprob": -1.0, "bytes": None, "top_logprobs": None}
    values = {"text": "", "text_offset": 0, "token_logprobs": [token], "first_logprob_index": 0}
    for since in ({}, {"since_epoch": 2, "since_attempt": 1}):
        for seen, restarted in ((values, True), ({**values, "token_logprobs": None}, False)):
            fold = ResultFold("r", "default")
            fold.apply(event("chunk", ORIGIN, 1, 1, **seen))
            step = fold.apply(event("chunk", ORIGIN, 2, 1, **values, **since))
            assert isinstance(step, Chunk)
            assert (step.restarted, step.logprobs, step.logprobs_offset) == (restarted, [token], 0)
            assert fold.restarts == restarted


def test_of_two_copies_that_run_in_one_place_the_first_worker_counts(fold: ResultFold) -> None:
    """The texts of two workers were read as one."""

    def says(worker_id: str, kind: str = "chunk", **values: object) -> Ignored | Chunk | Terminal:
        found = fold.apply(event(kind, ORIGIN, 8, 1, worker_id=worker_id, **values))
        assert isinstance(found, Ignored | Chunk | Terminal)
        return found

    answer = {"text": "yes or no", "tool_calls": None}
    assert isinstance(says("first", text="no", text_offset=0), Chunk)
    assert says("second", text="yes or", text_offset=0) is IGNORED
    assert says("second", "terminal", status="completed", text_generation=answer) is IGNORED
    assert fold.text == "no"
    again = event("terminal", ORIGIN, 8, 2, worker_id="second", status="completed", text_generation=answer)
    assert isinstance(fold.apply(again), Terminal), "another place: the followed copy gives the answer that stands"
