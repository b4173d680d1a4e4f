"""Which messages of a conversation count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conversation_logs import message
from penstock.common.conversations import ConversationRecord, fold_messages
from penstock.schemas.records import ConversationMessage, conversation_message_key


def record(offset: int, what: ConversationMessage, *, tombstone: bool = False) -> ConversationRecord:
    key = conversation_message_key(what)
    return ConversationRecord(offset=offset, timestamp_ms=0, key=key, message=None if tombstone else what)


def test_the_lowest_offset_of_a_request_direction_and_number_counts() -> None:
    records = [
        record(0, message("a", "in", 0, 1)),
        record(1, message("a", "in", 0, 2)),
        record(2, message("a", "out", 0, 2)),
        record(3, message("a", "out", 0, 1)),
        record(4, message("b", "in", 0, 2)),
        record(5, message("b", "in", 1, 2)),
    ]
    assert [(turn.offset, turn.message.epoch) for turn in fold_messages(records)] == [(0, 1), (2, 2), (4, 2), (5, 2)]


def test_a_tombstone_drops_what_its_key_named_and_summaries_are_no_messages() -> None:
    records = [
        record(0, message("a", "in", 0, 1)),
        record(1, message("a", "out", 0, 1)),
        record(2, message("a", "summary", 0, 1)),
        record(3, message("a", "in", 0, 1), tombstone=True),
    ]
    assert [turn.message.direction for turn in fold_messages(records)] == ["out"]


WRITES = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["in", "out"]), st.integers(0, 1), st.integers(1, 3)),
    unique=True,
    max_size=20,
)


@st.composite
def logs(draw: st.DrawFn) -> list[ConversationRecord]:
    """Keys are written once, as the contract says, and some are erased later."""
    written: list[ConversationMessage] = []
    keys: set[str] = set()
    for request_id, direction, index, epoch in draw(WRITES):
        made = message(request_id, direction, 0 if direction == "out" else index, epoch)
        if (key := conversation_message_key(made)) not in keys:
            keys.add(key)
            written.append(made)
    erased = draw(st.lists(st.sampled_from(written), max_size=6)) if written else []
    entries = [(made, False) for made in written] + [(made, True) for made in erased]
    return [record(offset, made, tombstone=gone) for offset, (made, gone) in enumerate(entries)]


@given(logs(), st.randoms(use_true_random=False))
def test_compaction_and_arrival_order_do_not_change_the_history(log: list[ConversationRecord], random: object) -> None:
    last = {entry.key: entry for entry in log}
    compacted = sorted(last.values(), key=lambda entry: entry.offset)
    shuffled = list(log)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fold_messages(compacted) == fold_messages(log) == fold_messages(shuffled)


@given(logs())
def test_each_place_in_the_conversation_is_taken_once_in_log_order(log: list[ConversationRecord]) -> None:
    turns = fold_messages(log)
    places = [(turn.message.request_id, turn.message.direction, turn.message.index) for turn in turns]
    assert len(set(places)) == len(places)
    assert [turn.offset for turn in turns] == sorted(turn.offset for turn in turns)
