"""Which conversations stand in the shared topic, from the keys of their heads alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import Address
from penstock.common.shards.heads import Heads
from penstock.common.shards.scanning import of_conversation


def test_a_conversation_goes_with_its_last_head_and_begins_anew_with_another() -> None:
    heads = Heads()
    heads.apply("c", b"fork/1", 0, is_tombstone=False)
    heads.apply("c", b"fork/2", 3, is_tombstone=False)  # two began it at a time
    heads.apply("acme.c", b"fork/3", 4, is_tombstone=False)
    assert (heads.first("c"), sorted(heads.conversations())) == (0, ["acme.c", "c"])
    heads.apply("c", b"fork/1", 5, is_tombstone=True)
    assert heads.first("c") == 3
    heads.apply("c", b"fork/2", 6, is_tombstone=True)
    assert (heads.first("c"), heads.conversations()) == (None, ["acme.c"])
    heads.apply("c", b"fork/2", 7, is_tombstone=True)  # repeated after a kill
    heads.apply("never", b"fork/9", 8, is_tombstone=True)
    assert heads.conversations() == ["acme.c"]
    heads.apply("c", b"fork/4", 9, is_tombstone=False)
    assert heads.first("c") == 9


@given(st.lists(st.tuples(st.sampled_from(["c", "acme.c"]), st.sampled_from([b"fork/1", b"fork/2"]), st.booleans())))
def test_it_is_what_a_whole_look_at_the_log_says(log: list[tuple[str, bytes, bool]]) -> None:
    heads, records = Heads(), list[RawMessage]()
    for offset, (conversation, key, is_tombstone) in enumerate(log):
        heads.apply(conversation, key, offset, is_tombstone=is_tombstone)
        own = Address(conversation, 0).key(key)
        records.append(RawMessage("t", 0, offset, 0, own, None if is_tombstone else b"head"))
    for conversation in ("c", "acme.c"):
        assert heads.first(conversation) == of_conversation(records, Address(conversation, 0))[0]
