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


FAR = range(0, 100, 10)
CASES: dict[str, tuple[list[tuple[Iterable[int], int]], list[tuple[int, ...]]]] = {
    "close together": ([([5, 6, 8, 9], 0)], [(5, 6, 8, 9)]),
    "far apart": ([(FAR, 0)], [(offset,) for offset in FAR]),
    "the urgent first, with their neighbours": (
        [([0, 100, 101], 5), ([102, 103], 1)], [(102, 103), (0,), (100, 101)]
    ),
    "once, if it becomes urgent": ([([0, 500], 5), ([500], 0), ([500], 9)], [(500,), (0,)]),
    "within one batch": ([(FAR, 0)], [tuple(FAR)]),
    "a gap of many bytes": ([([0, 1, 2, 3, 5, 6, 7], 0)], [(0, 1, 2, 3), (5, 6, 7)]),
    "a bounded range": (
        [(range(1000), 0)], [tuple(range(at, min(1000, at + MAX_WANTED))) for at in range(0, 1000, MAX_WANTED)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ranges(name: str) -> None:
    (wanted, expected), wants = CASES[name], Wants()
    if name == "within one batch":
        for _ in range(20):
            wants.sizes.saw_batch(500)
    if name == "a gap of many bytes":
        wants.sizes.saw_records(100, 100 * 100_000)
    for offsets, urgency in wanted:
        wants.add(offsets, urgency)
    assert ranges(wants) == expected


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
