"""Follows: each gets its records once and in order, from passes of the second consumer and the shared reader."""

from __future__ import annotations

from itertools import chain, cycle

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.reader import RawMessage
from penstock.producers.catchup import Pass
from penstock.producers.follow import Follow

TP = ("result", 0)


def raw(offset: int, key: bytes = b"k", *, partition: int = 0) -> RawMessage:
    return RawMessage("result", partition, offset, 0, key, b"v")


def follow(begin: int = 0, *, key: bytes = b"k", limit: int = 100) -> Follow:
    return Follow(key, {TP: begin}, limit, lambda: None)


def offsets(of: Follow) -> list[int]:
    return [taken.offset for taken in of.take()]


def test_records_before_the_begin_or_of_another_partition_are_not_taken() -> None:
    one = follow(5)
    for found in (raw(4), raw(5), raw(5), raw(9, partition=1), raw(7)):
        one.offer(found)
    assert offsets(one) == [5, 7]
    assert one.take() == []


def test_ready_is_called_once_until_the_buffer_is_emptied() -> None:
    calls: list[int] = []
    one = Follow(b"k", {TP: 0}, 10, lambda: calls.append(1))
    for offset, count in ((0, 1), (1, 1)):
        one.offer(raw(offset))
        assert len(calls) == count
    one.take()
    one.offer(raw(2))
    assert len(calls) == 2


def test_a_pass_serves_many_keys_and_beginnings() -> None:
    old, new, other = follow(0), follow(2), follow(0, key=b"o")
    going = Pass(position=0, goal=4)
    for each in (old, new, other):
        going.join(each)
    for offset, key in enumerate([b"k", b"o", b"k", b"x"]):
        assert going.give(raw(offset, key)) == []
    assert (offsets(old), offsets(new), offsets(other)) == ([0, 2], [2], [1])
    assert going.position == 4
    assert set(going.all()) == {old, new, other}


def test_a_follow_without_room_leaves_and_keeps_its_position() -> None:
    small, roomy = follow(limit=1), follow()
    going = Pass(position=0, goal=3)
    going.join(small)
    going.join(roomy)
    assert going.give(raw(0)) == []
    assert going.give(raw(1)) == [small]
    assert going.give(raw(2)) == []
    assert (offsets(small), offsets(roomy)) == ([0], [0, 1, 2])
    assert (small.parked, small.next(TP)) == (True, 1)
    assert going.all() == [roomy]


def test_a_parked_follow_skips_nothing() -> None:
    parked = follow(limit=1)
    assert parked.offer(raw(0))
    assert not parked.offer(raw(1))
    parked.pass_to(TP, 9)
    assert parked.resume() == {TP: 1}
    parked.pass_to(TP, 9)
    assert parked.next(TP) == 9


TURNS = st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=20)
"""Whether a pass or the shared reader continues, and by how many records."""


@given(st.lists(st.sampled_from([b"k", b"o"]), max_size=60), st.integers(1, 5), TURNS)
def test_passes_and_the_shared_reader_together_give_each_record_once(
    keys: list[bytes], limit: int, turns: list[tuple[bool, int]]
) -> None:
    """A follow that changes its reader and is parked and emptied at any moment gets the records of its key in order."""
    log = [raw(offset, key) for offset, key in enumerate(keys)]
    followed, got = follow(limit=limit), list[int]()
    coming = chain(turns, cycle([(True, 12), (False, 12)]))
    while followed.next(TP) < len(log):
        by_pass, far = next(coming)
        begin = followed.next(TP)
        goal = min(begin + far, len(log))
        if by_pass:
            going = Pass(position=begin, goal=max(goal, begin + 1))
            going.join(followed)
            while going.follows and going.position < going.goal:
                going.give(log[going.position])
            if going.follows:
                followed.pass_to(TP, going.position)
        else:  # the shared reader went back a little and goes on
            for record in log[max(0, begin - 3) : goal]:
                if record.key == followed.key and not followed.offer(record):
                    break
            followed.pass_to(TP, goal)
        taken = offsets(followed)
        assert len(taken) <= limit, "the buffer stays bounded"
        got += taken
        followed.resume()
    assert got == [record.offset for record in log if record.key == b"k"]
