"""Topics that are made anew under the same name, spans that fail, and readings that begin again."""

from __future__ import annotations

from penstock.gateway.summarizer.desk import Commit, Desk, Key, ReadWhole
from penstock.schemas.records import ConversationFacts, ConversationMessage, SummarizePolicy

KEY = Key("t", "c")
EVERY_TWO = SummarizePolicy(every_turns=2)


def message(number: int) -> ConversationMessage:
    """Of turns of a question and an answer, the message with this number."""
    direction, role = (("in", "user"), ("out", "assistant"))[number % 2]
    return ConversationMessage(
        tenant="t", conversation_id="c", direction=direction, role=role, content="word", created_at=0,
        request_id=f"r{number // 2}",
    )  # fmt: skip


def followed(end: int) -> Desk:
    """A desk that has read a topic with messages below this offset, and had all of it summed up that is due."""
    desk = Desk(lambda _: EVERY_TWO, most=8)
    desk.follow(KEY, "old", Commit(KEY, 0), end)
    for at in range(end):
        desk.record(KEY, at, message(at))
    while (submit := desk.next()) is not None:
        desk.ended(submit, end, failed=False)
    return desk


def test_a_topic_that_is_made_anew_between_two_looks_is_due_though_it_is_shorter() -> None:
    desk = followed(48)
    new = [message(at) for at in range(16)]
    assert isinstance(desk.record(KEY, 0, new[0]), ReadWhole)
    desk.read_whole(KEY, list(enumerate(new)), 16)
    assert desk.next() is not None


def test_a_topic_that_is_made_anew_and_empty_is_read_once() -> None:
    desk = followed(48)
    assert isinstance(desk.record(KEY, 48, None), ReadWhole)
    assert isinstance(desk.read_whole(KEY, [], 0), ReadWhole), "more may have come while it was read"
    assert not isinstance(desk.read_whole(KEY, [], 0), ReadWhole)


def test_the_policy_of_a_former_topic_keeps_no_later_one_from_being_followed() -> None:
    desk = Desk(lambda _: EVERY_TWO, most=1)
    off = SummarizePolicy(every_turns=0)
    desk.set_facts(KEY, ConversationFacts(tenant="t", conversation_id="c", updated_at=0, topic_id="old", summarize=off))
    assert desk.policy(KEY, "new") == EVERY_TWO
    assert desk.wants(KEY), "the topic that is there now may be another one"


def test_a_span_that_failed_is_not_asked_for_again_by_the_next_process() -> None:
    desk = Desk(lambda _: EVERY_TWO, most=8)
    desk.follow(KEY, "id", Commit(KEY, 0), 12)
    for at in range(12):
        desk.record(KEY, at, message(at))
    submit = desk.next()
    assert submit is not None
    assert submit.through == 3
    committed = desk.ended(submit, 12, failed=True)
    assert committed == Commit(KEY, 0, 0, 3)
    for again in (None, 12):
        later = Desk(lambda _: EVERY_TWO, most=8)
        later.follow(KEY, "id", committed, 12)
        for at in range(12):
            later.record(KEY, at, message(at))
        if again is not None:  # a tombstone of something else
            assert isinstance(later.record(KEY, again, None), ReadWhole)
            later.read_whole(KEY, [(at, message(at)) for at in range(12)], 13)
        assert later.next() is None
        for at in range(13, 17):
            later.record(KEY, at, message(at + 1))
        found = later.next()
        assert found is not None
        assert found.through == 7, "its turns are part of the next span"


def test_what_is_summed_up_and_erased_is_asked_for_again() -> None:
    desk = followed(12)
    gone = {2, 3}
    assert isinstance(desk.record(KEY, 12, None), ReadWhole)
    left = [(at, message(at)) for at in range(12) if at not in gone]
    desk.read_whole(KEY, left, 13)
    desk.record(KEY, 13, message(12))
    desk.record(KEY, 14, message(13))
    found = desk.next()
    assert found is not None
    assert found.through == 5


def test_what_came_while_the_whole_was_read_is_not_passed_over() -> None:
    desk = followed(8)
    assert isinstance(desk.record(KEY, 8, None), ReadWhole)
    for at in range(9, 13):
        assert desk.record(KEY, at, message(at - 1)) is None
    whole = [(at, message(at)) for at in range(8)]
    assert isinstance(desk.read_whole(KEY, whole, 9), ReadWhole)
    whole += [(at, message(at - 1)) for at in range(9, 13)]
    assert not isinstance(desk.read_whole(KEY, whole, 13), ReadWhole)
    found = desk.next()
    assert found is not None
    assert found.through == 3


def test_negative_counts_of_others_make_nothing_due() -> None:
    desk = Desk(lambda _: SummarizePolicy(every_turns=-1, every_tokens=-5), most=1)
    desk.follow(KEY, "id", Commit(KEY, 0), 40)
    for at in range(40):
        desk.record(KEY, at, message(at))
    assert desk.next() is None
    assert not desk.wants(KEY)


def summary(through: int) -> ConversationMessage:
    return ConversationMessage(
        tenant="t", conversation_id="c", direction="summary", role="system", content="told", created_at=0,
        request_id=f"s{through}", covers_through=through,
    )  # fmt: skip


def test_a_summary_that_was_erased_while_nobody_looked_is_missed() -> None:
    desk = Desk(lambda _: EVERY_TWO, most=8)
    desk.follow(KEY, "id", Commit(KEY, 4), 13)
    found = [desk.record(KEY, at, message(at)) for at in range(4, 12)]
    assert found == [None] * 8
    assert isinstance(desk.reached(KEY, 13), ReadWhole), "the summary that ends at 3 stands nowhere"
    assert desk.next() is None, "not before that is read"
    assert desk.read_whole(KEY, [(at, message(at)) for at in range(12)], 13) == Commit(KEY, 0)
    found_due = desk.next()
    assert found_due is not None
    assert found_due.through == 3


def test_what_is_told_again_after_the_whole_was_read_counts_once() -> None:
    desk = followed(8)
    assert isinstance(desk.record(KEY, 8, None), ReadWhole)
    desk.read_whole(KEY, [(at, message(at if at < 8 else at - 1)) for at in range(11) if at != 8], 11)
    for at in range(9, 11):
        assert desk.record(KEY, at, message(at - 1)) is None
    assert desk.next() is None, "five turns, not six"


def test_a_span_of_which_something_was_erased_while_it_was_summed_up_is_due_by_itself() -> None:
    desk = Desk(lambda _: EVERY_TWO, most=8)
    desk.follow(KEY, "id", Commit(KEY, 0), 14)
    for at in range(14):
        desk.record(KEY, at, message(at))
    submit = desk.next()
    assert submit is not None
    assert isinstance(desk.record(KEY, 14, None), ReadWhole)
    desk.read_whole(KEY, [(at, message(at)) for at in range(14) if at not in (0, 1)], 15)
    assert desk.ended(submit, 15, failed=True) is None, "as a conflict"
    again = desk.next()
    assert again is not None
    assert again.through == 5
    assert again.request_id != submit.request_id


def test_of_two_summaries_that_end_at_one_place_the_first_is_the_base() -> None:
    ids: list[str] = []
    for seconds in ((), (12,)):
        desk = Desk(lambda _: EVERY_TWO, most=8)
        desk.follow(KEY, "id", Commit(KEY, 0), 20)
        for at in range(8):
            desk.record(KEY, at, message(at))
        desk.record(KEY, 8, summary(3))
        for at in seconds:
            desk.record(KEY, at, summary(3))
        for at in range(13, 21):
            desk.record(KEY, at, message(at - 5))
        submit = desk.next()
        assert submit is not None
        ids.append(submit.request_id)
    assert len(set(ids)) == 1


def test_nothing_is_due_before_it_is_known_what_an_erasure_left() -> None:
    desk = Desk(lambda _: EVERY_TWO, most=8)
    desk.follow(KEY, "id", Commit(KEY, 0), 12)
    for at in range(12):
        desk.record(KEY, at, message(at))
    assert desk.due == 1
    assert isinstance(desk.record(KEY, 12, None), ReadWhole)
    assert desk.due == 0
    assert desk.next() is None
