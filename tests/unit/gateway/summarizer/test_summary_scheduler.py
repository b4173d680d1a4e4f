"""Which span of a conversation is due, and the desk after a break."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kit.records import conversation_message
from penstock.gateway.summarizer.spans import Spans, tokens_of
from penstock.gateway.summarizer.summary_scheduler import Commit, Key, ReadWhole, Submit, SummaryScheduler
from penstock.schemas.records import ConversationMessage, SummarizePolicy, Usage

# -- spans: due after whole turns or tokens, four turns before the end


ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TURN = "ua"
EVERY_TWO = SummarizePolicy(every_turns=2)


def fed(spans: Spans, records: Iterable[str | int], offset: int = 0, **fields: Any) -> int:
    """With messages by their roles, and summaries as the offsets that they cover; the next offset."""
    for record in records:
        role, more = (ROLES[record], fields) if isinstance(record, str) else ("assistant", {"covers_through": record})
        spans.add(offset, conversation_message(role, **more))
        offset += 1
    return offset


@pytest.mark.parametrize(
    ("covered", "records", "turns", "every_turns", "due"),
    [
        # When four more turns have begun.
        (-1, TURN * 5, 5, 2, None),
        (-1, TURN * 5 + "u", 6, 2, 3),
        # What a summary covers does not count again.
        (-1, [*TURN * 8, 3], 6, 2, 7),
        (-1, [*TURN * 8, 3, 7], 4, 2, None),
        (-1, [*TURN * 8, 3, 7, *TURN * 2], 6, 2, 11),
        # The same is found when reading starts after the last summary.
        (3, [*TURN * 6, 3], 6, 2, 7),
        # A turn whose question is summarized counts as a turn.
        (-1, [*TURN * 6, 2], 5, 1, 3),
        (2, "a" + TURN * 4, 5, 1, 3),
        # System messages and tools begin no turn, nor does a second question.
        (-1, "suuatas" + TURN * 4, 5, 1, 6),
        (-1, TURN * 50, 50, None, None),
        (-1, TURN * 50, 50, 0, None),
        (-1, TURN * 50, 50, -1, None),
    ],
)
def test_a_span_is_due_after_whole_turns(
    covered: int, records: Iterable[str | int], turns: int, every_turns: int | None, due: int | None
) -> None:
    spans = Spans(covered)
    fed(spans, records, covered + 1)
    assert spans.turns == turns
    assert spans.due(SummarizePolicy(every_turns=every_turns)) == due
    assert spans.covered == max([covered, *(one for one in records if isinstance(one, int))])


@pytest.mark.parametrize(
    ("every_tokens", "every_turns", "due"),
    [(50, None, 5), (121, None, None), (50, 2, 3), (20, 2, 1), (0, 0, None), (None, None, None)],
)
def test_the_first_of_turns_and_tokens_counts(
    every_tokens: int | None, every_turns: int | None, due: int | None
) -> None:
    spans = Spans()
    fed(spans, TURN * 10, content="x" * 40)  # 20 tokens a turn
    assert spans.due(SummarizePolicy(every_tokens=every_tokens, every_turns=every_turns)) == due


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"content": "12345678"}, 2),
        ({"content": "é" * 4}, 2),
        ({"content": "1"}, 1),
        ({"content": "1" * 400, "usage": Usage(prompt_tokens=9, completion_tokens=7)}, 7),
    ],
)
def test_tokens_are_counted_by_the_model_or_by_four_bytes(fields: dict[str, Any], tokens: int) -> None:
    assert tokens_of(conversation_message("assistant", **fields)) == tokens


# -- the desk after a break


KEY = Key("t", "c")


def turn_message(number: int) -> ConversationMessage:
    """Of turns of a question and an answer, the message with this number."""
    return conversation_message(("user", "assistant")[number % 2], request_id=f"r{number // 2}")


def standing(offsets: Iterable[int], shift: int = 0) -> list[tuple[int, ConversationMessage]]:
    """Messages at these offsets; `shift`: so many records before them are none."""
    return [(at, turn_message(at - shift)) for at in offsets]


def tell(scheduler: SummaryScheduler, offsets: Iterable[int], shift: int = 0) -> None:
    for at, one in standing(offsets, shift):
        assert scheduler.record(KEY, at, one) is None


def new_desk(
    messages: int = 0, *, end: int | None = None, commit: Commit | None = None, most: int = 8
) -> SummaryScheduler:
    """A desk that follows a topic up to `end` and has read so many messages of it."""
    scheduler = SummaryScheduler(lambda _: EVERY_TWO, most=most)
    scheduler.follow(KEY, "id", commit or Commit(KEY, 0), messages if end is None else end)
    tell(scheduler, range(messages))
    return scheduler


def summed_up(messages: int) -> SummaryScheduler:
    """The same, when all spans that are due were summed up."""
    scheduler = new_desk(messages)
    while (submit := scheduler.next()) is not None:
        scheduler.ended(submit, messages, failed=False)
    return scheduler


def due(scheduler: SummaryScheduler) -> int | None:
    """Where the span ends that is due next."""
    submit = scheduler.next()
    return None if submit is None else submit.through


def submitted(scheduler: SummaryScheduler, through: int) -> Submit:
    """The next one, which ends there."""
    submit = scheduler.next()
    assert submit.through == through
    return submit


def erase(scheduler: SummaryScheduler, at: int) -> None:
    """A tombstone is read, after which the whole topic must be read."""
    assert isinstance(scheduler.record(KEY, at, None), ReadWhole)


def test_an_empty_topic_that_was_made_again_is_read_once() -> None:
    scheduler = summed_up(48)
    erase(scheduler, 48)
    assert isinstance(scheduler.read_whole(KEY, [], 0), ReadWhole), "more may have come while it was read"
    assert not isinstance(scheduler.read_whole(KEY, [], 0), ReadWhole)


def test_a_failed_span_is_not_asked_for_again_by_the_next_process() -> None:
    scheduler = new_desk(12)
    committed = scheduler.ended(submitted(scheduler, 3), 12, failed=True)
    assert committed == Commit(KEY, 0, 0, 3)
    for erased in (False, True):
        later = new_desk(12, commit=committed)
        if erased:  # something else
            erase(later, 12)
            later.read_whole(KEY, standing(range(12)), 13)
        assert due(later) is None
        tell(later, range(13, 17), shift=-1)
        assert due(later) == 7, "its turns are part of the next span"


def test_records_that_come_while_the_whole_is_read_count() -> None:
    scheduler = new_desk(12)
    assert scheduler.due == 1
    erase(scheduler, 12)
    assert (scheduler.due, due(scheduler)) == (0, None)
    scheduler = summed_up(8)
    erase(scheduler, 8)
    tell(scheduler, range(9, 13), shift=1)
    whole = standing(range(8))
    assert isinstance(scheduler.read_whole(KEY, whole, 9), ReadWhole)
    assert not isinstance(scheduler.read_whole(KEY, whole + standing(range(9, 13), shift=1), 13), ReadWhole)
    assert due(scheduler) == 3


def test_records_that_are_read_again_after_the_whole_count_once() -> None:
    scheduler = summed_up(8)
    erase(scheduler, 8)
    scheduler.read_whole(KEY, standing(range(8)) + standing((9, 10), shift=1), 11)
    tell(scheduler, (9, 10), shift=1)
    assert due(scheduler) is None, "five turns, not six"


def test_a_summary_that_was_erased_while_no_process_ran_is_missed() -> None:
    scheduler = new_desk(end=13, commit=Commit(KEY, 4))
    tell(scheduler, range(4, 12))
    assert isinstance(scheduler.reached(KEY, 13), ReadWhole), "the summary that ends at 3 is nowhere"
    assert due(scheduler) is None, "not before that is read"
    assert scheduler.read_whole(KEY, standing(range(12)), 13) == Commit(KEY, 0)
    assert due(scheduler) == 3


def test_a_span_that_lost_messages_while_it_was_summed_up_is_due_by_itself() -> None:
    scheduler = new_desk(14)
    submit = submitted(scheduler, 3)
    erase(scheduler, 14)
    scheduler.read_whole(KEY, standing(range(2, 14)), 15)
    assert scheduler.ended(submit, 15, failed=True) is None, "as a conflict"
    assert submitted(scheduler, 5).request_id != submit.request_id


def test_of_two_summaries_that_end_at_one_place_the_first_is_the_base() -> None:
    ids: set[str] = set()
    for summaries in ((8,), (8, 12)):
        scheduler = new_desk(8, end=20)
        for at in summaries:
            scheduler.record(KEY, at, conversation_message("system", request_id="s3", covers_through=3))
        tell(scheduler, range(13, 21), shift=5)
        ids.add(submitted(scheduler, 7).request_id)
    assert len(ids) == 1
