"""The desk after a break: topics that are made again under the same name, spans that fail, readings that restart."""

from __future__ import annotations

from collections.abc import Iterable

from kit.gateway_records import conversation_message
from penstock.gateway.summarizer.desk import Commit, Desk, Key, ReadWhole, Submit
from penstock.schemas.records import ConversationMessage, SummarizePolicy

KEY = Key("t", "c")
EVERY_TWO = SummarizePolicy(every_turns=2)


def message(number: int) -> ConversationMessage:
    """Of turns of a question and an answer, the message with this number."""
    return conversation_message(("user", "assistant")[number % 2], request_id=f"r{number // 2}")


def standing(offsets: Iterable[int], shift: int = 0) -> list[tuple[int, ConversationMessage]]:
    """Messages at these offsets; `shift`: so many records before them are none."""
    return [(at, message(at - shift)) for at in offsets]


def tell(desk: Desk, offsets: Iterable[int], shift: int = 0) -> None:
    for at, one in standing(offsets, shift):
        assert desk.record(KEY, at, one) is None


def new_desk(messages: int = 0, *, end: int | None = None, commit: Commit | None = None, most: int = 8) -> Desk:
    """A desk that follows a topic up to `end` and has read so many messages of it."""
    desk = Desk(lambda _: EVERY_TWO, most=most)
    desk.follow(KEY, "id", commit or Commit(KEY, 0), messages if end is None else end)
    tell(desk, range(messages))
    return desk


def summed_up(messages: int) -> Desk:
    """The same, when all spans that are due were summed up."""
    desk = new_desk(messages)
    while (submit := desk.next()) is not None:
        desk.ended(submit, messages, failed=False)
    return desk


def due(desk: Desk) -> int | None:
    """Where the span ends that is due next."""
    submit = desk.next()
    return None if submit is None else submit.through


def submitted(desk: Desk, through: int) -> Submit:
    """The next one, which ends there."""
    submit = desk.next()
    assert submit is not None
    assert submit.through == through
    return submit


def erase(desk: Desk, at: int) -> None:
    """A tombstone is read, after which the whole topic must be read."""
    assert isinstance(desk.record(KEY, at, None), ReadWhole)


def test_a_shorter_topic_that_was_made_between_two_looks_is_due() -> None:
    desk = summed_up(48)
    assert isinstance(desk.record(KEY, 0, message(0)), ReadWhole)
    desk.read_whole(KEY, standing(range(16)), 16)
    assert due(desk) is not None


def test_an_empty_topic_that_was_made_again_is_read_once() -> None:
    desk = summed_up(48)
    erase(desk, 48)
    assert isinstance(desk.read_whole(KEY, [], 0), ReadWhole), "more may have come while it was read"
    assert not isinstance(desk.read_whole(KEY, [], 0), ReadWhole)


def test_a_failed_span_is_not_asked_for_again_by_the_next_process() -> None:
    desk = new_desk(12)
    committed = desk.ended(submitted(desk, 3), 12, failed=True)
    assert committed == Commit(KEY, 0, 0, 3)
    for erased in (False, True):
        later = new_desk(12, commit=committed)
        if erased:  # something else
            erase(later, 12)
            later.read_whole(KEY, standing(range(12)), 13)
        assert due(later) is None
        tell(later, range(13, 17), shift=-1)
        assert due(later) == 7, "its turns are part of the next span"


def test_a_summarized_span_that_is_erased_is_asked_for_again() -> None:
    desk = summed_up(12)
    erase(desk, 12)
    desk.read_whole(KEY, standing(at for at in range(12) if at not in (2, 3)), 13)
    tell(desk, (13, 14), shift=1)
    assert due(desk) == 5


def test_records_that_come_while_the_whole_is_read_count() -> None:
    """Nothing is due before it is known what an erasure left."""
    desk = new_desk(12)
    assert desk.due == 1
    erase(desk, 12)
    assert (desk.due, due(desk)) == (0, None)
    desk = summed_up(8)
    erase(desk, 8)
    tell(desk, range(9, 13), shift=1)
    whole = standing(range(8))
    assert isinstance(desk.read_whole(KEY, whole, 9), ReadWhole)
    assert not isinstance(desk.read_whole(KEY, whole + standing(range(9, 13), shift=1), 13), ReadWhole)
    assert due(desk) == 3


def test_records_that_are_read_again_after_the_whole_count_once() -> None:
    desk = summed_up(8)
    erase(desk, 8)
    desk.read_whole(KEY, standing(range(8)) + standing((9, 10), shift=1), 11)
    tell(desk, (9, 10), shift=1)
    assert due(desk) is None, "five turns, not six"


def test_negative_counts_of_others_make_nothing_due() -> None:
    desk = Desk(lambda _: SummarizePolicy(every_turns=-1, every_tokens=-5), most=1)
    desk.follow(KEY, "id", Commit(KEY, 0), 40)
    tell(desk, range(40))
    assert due(desk) is None
    assert not desk.wants(KEY)


def test_a_summary_that_was_erased_while_no_process_ran_is_missed() -> None:
    desk = new_desk(end=13, commit=Commit(KEY, 4))
    tell(desk, range(4, 12))
    assert isinstance(desk.reached(KEY, 13), ReadWhole), "the summary that ends at 3 is nowhere"
    assert due(desk) is None, "not before that is read"
    assert desk.read_whole(KEY, standing(range(12)), 13) == Commit(KEY, 0)
    assert due(desk) == 3


def test_a_span_that_lost_messages_while_it_was_summed_up_is_due_by_itself() -> None:
    desk = new_desk(14)
    submit = submitted(desk, 3)
    erase(desk, 14)
    desk.read_whole(KEY, standing(range(2, 14)), 15)
    assert desk.ended(submit, 15, failed=True) is None, "as a conflict"
    assert submitted(desk, 5).request_id != submit.request_id


def test_of_two_summaries_that_end_at_one_place_the_first_is_the_base() -> None:
    ids: set[str] = set()
    for summaries in ((8,), (8, 12)):
        desk = new_desk(8, end=20)
        for at in summaries:
            desk.record(KEY, at, conversation_message("system", request_id="s3", covers_through=3))
        tell(desk, range(13, 21), shift=5)
        ids.add(submitted(desk, 7).request_id)
    assert len(ids) == 1
