"""Ranges of offsets to read in one go: close ones together, far ones alone, the urgent first."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.refetch_plan import MAX_WANTED, READ_THROUGH_RATIO, Wants


def ranges(wants: Wants) -> list[tuple[int, ...]]:
    """All ranges until nothing is wanted, as if every record came."""
    chosen: list[tuple[int, ...]] = []
    while (next_range := wants.next_range()) is not None:
        chosen.append(next_range.offsets)
        for offset in next_range.offsets:
            wants.discard(offset)
    return chosen


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([([5, 6, 8, 9], 0)], [(5, 6, 8, 9)]),
        ([(range(0, 100, 10), 0)], [(offset,) for offset in range(0, 100, 10)]),
        ([([0, 100, 101], 5), ([102, 103], 1)], [(102, 103), (0,), (100, 101)]),
        ([([0, 500], 5), ([500], 0), ([500], 9)], [(500,), (0,)]),
    ],
    ids=["close together", "far apart", "the urgent first, with their neighbours", "once, if it becomes urgent"],
)
def test_ranges(wanted: list[tuple[Iterable[int], int]], expected: list[tuple[int, ...]]) -> None:
    wants = Wants()
    for offsets, urgency in wanted:
        wants.add(offsets, urgency)
    assert ranges(wants) == expected


def test_records_of_one_batch_are_one_range() -> None:
    wants = Wants()
    for _ in range(20):
        wants.sizes.saw_batch(500)
    wants.add(range(0, 1000, 10), 0)
    assert len(ranges(wants)) == 1


def test_a_gap_of_many_bytes_is_never_read_through() -> None:
    wants = Wants()
    wants.sizes.saw_records(100, 100 * 100_000)
    wants.add([0, 1, 2, 3, 5, 6, 7], 0)
    assert ranges(wants) == [(0, 1, 2, 3), (5, 6, 7)]


def test_a_range_is_bounded() -> None:
    wants = Wants()
    wants.add(range(1000), 0)
    assert [len(offsets) for offsets in ranges(wants)] == [MAX_WANTED] * 3 + [1000 - 3 * MAX_WANTED]


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3)), max_size=200))
def test_every_offset_is_in_one_range_and_no_range_reads_too_much(wanted: list[tuple[int, int]]) -> None:
    wants = Wants()
    for offset, urgency in wanted:
        wants.add([offset], urgency)
    chosen = ranges(wants)
    assert sorted(offset for offsets in chosen for offset in offsets) == sorted({offset for offset, _ in wanted})
    assert len(wants) == 0
    for offsets in chosen:
        assert list(offsets) == sorted(set(offsets))
        assert offsets[-1] - offsets[0] + 1 <= max(2, READ_THROUGH_RATIO * len(offsets))
