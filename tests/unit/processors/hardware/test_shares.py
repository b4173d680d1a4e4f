"""What is in use on a device, parted into ours and others'."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.hardware.probe import Reading
from penstock.processors.hardware.shares import EngineUse, Shares, simulated, split

A, B = ("a", 0), ("b", 0)


def engine(key: tuple[str, int], granted: int = 40, **fields: Any) -> EngineUse:
    return EngineUse(key=key, granted_bytes=granted, **fields)


def test_listed_processes_count_with_their_whole_tree_also_while_they_load() -> None:
    reading = Reading(used_bytes=60, by_pid={10: 5, 11: 15, 20: 12, 99: 28})
    found = split(reading, [engine(A, pids={10, 11, 12}), engine(B, pids={20}, loading=True)], None)
    assert found == Shares(used_bytes=60, ours_bytes=32, foreign_bytes=28, measured={A: 20, B: 12})


def test_where_processes_are_listed_one_that_has_not_touched_the_device_yet_has_nothing() -> None:
    before = Shares(foreign_bytes=10)
    found = split(Reading(used_bytes=50, by_pid={99: 50}), [engine(A, pids={10}, loading=True)], before)
    assert (found.foreign_bytes, found.measured) == (50, {A: 0})


def test_without_a_list_what_engines_report_or_were_granted_is_theirs() -> None:
    found = split(Reading(used_bytes=70), [engine(A, reported_bytes=25), engine(B, 30)], None)
    assert found == Shares(used_bytes=70, ours_bytes=55, foreign_bytes=15, measured={A: 25})


def test_without_a_list_what_comes_while_one_loads_is_its_own_up_to_its_grant() -> None:
    before = split(Reading(used_bytes=10), [], None)
    for used, measured, foreign in ((10, 0, 10), (30, 20, 10), (50, 40, 10), (65, 40, 25)):
        found = split(Reading(used_bytes=used), [engine(A, loading=True)], before)
        assert (found.measured[A], found.foreign_bytes) == (measured, foreign)
        if used <= 50:
            before = found
    ready = split(Reading(used_bytes=65), [engine(A, reported_bytes=38)], before)
    assert ready.foreign_bytes == 27


def test_before_anything_was_measured_nothing_is_taken_for_a_load() -> None:
    assert split(Reading(used_bytes=10), [engine(A, loading=True)], None).foreign_bytes == 10


def test_engines_on_a_simulated_device_use_what_they_were_granted() -> None:
    found = simulated(Reading(used_bytes=7), [engine(A, loading=True), engine(B, 30)])
    assert found == Shares(used_bytes=77, ours_bytes=70, foreign_bytes=7)


PIDS = st.frozensets(st.integers(1, 6), max_size=3)
USES = st.builds(
    EngineUse,
    key=st.tuples(st.sampled_from("abc"), st.integers(0, 1)),
    granted_bytes=st.integers(0, 100),
    loading=st.booleans(),
    pids=PIDS,
    reported_bytes=st.none() | st.integers(0, 120),
)


@given(
    used=st.integers(0, 300),
    listed=st.none() | st.dictionaries(st.integers(1, 8), st.integers(0, 100)),
    uses=st.lists(USES, max_size=4, unique_by=lambda one: one.key),
    foreign=st.none() | st.integers(0, 300),
)
def test_what_is_in_use_is_parted_without_rest(
    used: int, listed: dict[int, int] | None, uses: list[EngineUse], foreign: int | None
) -> None:
    before = None if foreign is None else Shares(foreign_bytes=foreign)
    found = split(Reading(used_bytes=used, by_pid=listed), uses, before)
    assert found.ours_bytes + found.foreign_bytes == found.used_bytes == used
    assert min(found.ours_bytes, found.foreign_bytes, *found.measured.values(), 0) == 0
    for one in uses:
        if one.loading and listed is None:
            assert found.measured[one.key] <= one.granted_bytes
