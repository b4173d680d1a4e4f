"""The buffer of one follow: each record once, in order, parked when full, never losing one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.reader import RawMessage
from penstock.producers.follow import Follow

TP = ("result", 0)


def message(offset: int, partition: int = 0) -> RawMessage:
    return RawMessage("result", partition, offset, 0, b"k", b"v")


def offsets(messages: list[RawMessage]) -> list[int]:
    return [found.offset for found in messages]


def test_what_is_before_the_begin_or_on_another_partition_is_not_taken() -> None:
    follow = Follow(b"k", {TP: 5}, 10, lambda: None)
    for found in (message(4), message(5), message(5), message(9, partition=1), message(7)):
        follow.offer(found)
    assert offsets(follow.take()) == [5, 7]
    assert follow.take() == []


def test_ready_is_told_once_until_the_buffer_was_emptied() -> None:
    told: list[int] = []
    follow = Follow(b"k", {TP: 0}, 10, lambda: told.append(1))
    follow.offer(message(0))
    follow.offer(message(1))
    assert len(told) == 1
    follow.take()
    follow.offer(message(2))
    assert len(told) == 2


@given(st.integers(1, 5), st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_a_slow_reader_gets_everything_in_order_and_the_buffer_stays_bounded(limit: int, pattern: list[int]) -> None:
    end, follow, got, position = 20, Follow(b"k", {TP: 0}, limit, lambda: None), list[int](), 0
    steps = iter([*pattern, *[3] * 200])
    while len(got) < end:
        for _ in range(next(steps) * 3):  # the log is read on, whether the follow has room or not
            if position < end:
                follow.offer(message(position))
                position += 1
        taken = follow.take()
        assert len(taken) <= limit
        got += offsets(taken)
        if follow.parked:
            position = min(position, follow.resume()[TP])
    assert got == list(range(end))
