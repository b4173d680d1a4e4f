"""What was fetched: batches join without a gap, urgent topics go first, nobody starves, too much is paused."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.kafka.batches import TP, DeliveredRecord
from penstock.processors.kafka.fetch_buffer import BATCH_BYTES, BATCH_RECORDS, FAIR_SHARE, FetchBuffer, OffsetsWentBack

HIGH, LOW = ("high", 0), ("low", 0)
NOBODY: frozenset[TP] = frozenset()


def record(offset: int, size: int = 1) -> DeliveredRecord:
    return DeliveredRecord(offset, 0, None, b"x" * size, (), True)


def filled(counts: dict[TP, int], *, size: int = 1, total_bytes: int = 16_000_000) -> FetchBuffer:
    buffer = FetchBuffer(["high", "medium", "low"].index, total_bytes)
    buffer.assign(dict.fromkeys(counts, 0))
    for tp, count in counts.items():
        for offset in range(count):
            buffer.add(tp, record(offset, size))
    return buffer


def test_a_lower_offset_than_expected_is_an_error() -> None:
    buffer = filled({LOW: 3})
    with pytest.raises(OffsetsWentBack):
        buffer.add(LOW, record(2))
    buffer.reached_end(LOW, 1)  # an old end is nothing new
    assert buffer.ends() == {LOW: 3}


def test_records_of_partitions_that_are_not_assigned_are_dropped() -> None:
    buffer = filled({LOW: 1})
    buffer.add(HIGH, record(0))
    buffer.reached_end(HIGH, 7)
    assert [piece[0] for piece in iter(lambda: buffer.take(NOBODY), None)] == [LOW]


def test_urgent_topics_go_first_but_one_batch_in_a_few_is_of_who_waited_longest() -> None:
    buffer = filled({LOW: BATCH_RECORDS * 20, HIGH: BATCH_RECORDS * 40})
    order = [piece[0] for piece in iter(lambda: buffer.take(NOBODY), None)]
    early = Counter(order[: FAIR_SHARE * 5])
    assert early[HIGH] >= FAIR_SHARE * 5 * (FAIR_SHARE - 1) / FAIR_SHARE
    assert early[LOW] >= 2
    assert order[0] == HIGH


def test_held_partitions_are_passed_over() -> None:
    buffer = filled({LOW: 1, HIGH: 1})
    assert buffer.has_any(frozenset([HIGH]))
    assert (buffer.take(frozenset([HIGH])) or ((), 0))[0] == LOW
    assert not buffer.has_any(frozenset([HIGH]))
    assert buffer.take(frozenset([HIGH])) is None
    assert not buffer.empty
    assert (buffer.take(NOBODY) or ((), 0))[0] == HIGH


def test_batches_are_bounded_by_bytes_but_a_large_record_goes_alone() -> None:
    buffer = filled({LOW: 5}, size=BATCH_BYTES * 2 // 5)
    assert [len(piece[3]) for piece in iter(lambda: buffer.take(NOBODY), None)] == [2, 2, 1]
    buffer = filled({LOW: 2}, size=BATCH_BYTES * 2)
    assert [len(piece[3]) for piece in iter(lambda: buffer.take(NOBODY), None)] == [1, 1]


def test_a_partition_with_too_much_pauses_until_a_quarter_is_left() -> None:
    buffer = filled({LOW: 300, HIGH: 1}, size=10_000, total_bytes=4_000_000)
    assert buffer.pauses(NOBODY) == {LOW}
    paused = frozenset([LOW])
    left = 300
    while left * 10_300 >= 500_000:
        assert buffer.pauses(paused) == paused
        piece = buffer.take(NOBODY)
        left -= len(piece[3]) if piece[0] == LOW else 0
    assert buffer.pauses(paused) == NOBODY
    assert buffer.pauses(NOBODY) == NOBODY


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from([HIGH, LOW]), st.integers(0, 3)),
            st.tuples(st.just("end"), st.sampled_from([HIGH, LOW]), st.integers(0, 3)),
            st.tuples(st.just("take"), st.sampled_from([NOBODY, frozenset([HIGH])]), st.just(0)),
        ),
        max_size=60,
    )
)
def test_batches_of_a_partition_always_join(steps: list[tuple[str, TP | frozenset[TP], int]]) -> None:
    buffer = filled({HIGH: 0, LOW: 0})
    fed, got = dict[TP, list[int]]({HIGH: [], LOW: []}), dict[TP, list[int]]({HIGH: [], LOW: []})
    ends, handed = dict[TP, int]({HIGH: 0, LOW: 0}), dict[TP, int]({HIGH: 0, LOW: 0})

    def take(held: frozenset[TP]) -> bool:
        piece = buffer.take(held)
        if piece is None:
            return False
        tp, start, end, records = piece
        assert tp not in held
        assert (start, end > start) == (handed[tp], True)
        assert all(start <= r.offset < end for r in records)
        handed[tp] = end
        got[tp] += [r.offset for r in records]
        return True

    for kind, where, gap in steps:
        if isinstance(where, frozenset):
            take(where)
            continue
        ends[where] += gap
        if kind == "add":
            buffer.add(where, record(ends[where]))
            fed[where].append(ends[where])
            ends[where] += 1
        else:
            buffer.reached_end(where, ends[where])
    while take(NOBODY):
        pass
    assert (got, handed) == (fed, ends)
    assert buffer.empty
