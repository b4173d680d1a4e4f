"""The stall watch: only a partition with lag, unpaused, with room in intake and an unmoving position is a stall."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from penstock.processors.kafka.batches import PartitionProgress
from penstock.processors.kafka.watchdog import DeliveryWatch, JoinWatch, StallWatch

TP = ("t", 0)


def seen(
    position: int = 5, highwater: int | None = 9, *, paused: bool = False
) -> dict[tuple[str, int], PartitionProgress]:
    return {TP: PartitionProgress(position=position, highwater=highwater, paused=paused)}


def look_until(watch: StallWatch, end: int, *, begin: int = 0) -> frozenset[tuple[str, int]]:
    """Looked at every second, as the worker does."""
    return [watch.look(seen(), room=True, now=now) for now in range(begin, end + 1)][-1]


def test_lag_without_movement_is_a_stall_after_the_limit() -> None:
    watch = StallWatch(10)
    assert look_until(watch, 9) == frozenset()
    assert watch.look(seen(), room=True, now=9.9) == frozenset()
    assert watch.look(seen(), room=True, now=10) == {TP}


@pytest.mark.parametrize(
    ("between", "room"),
    [
        (seen(6), True),
        (seen(paused=True), True),
        (seen(), False),
        (seen(9, 9), True),
        (seen(5, None), True),
        ({}, True),
    ],
    ids=["moved", "paused", "no room", "no lag", "end unknown", "not owned"],
)
def test_these_are_no_stalls(between: dict[tuple[str, int], PartitionProgress], room: bool) -> None:
    watch = StallWatch(10)
    look_until(watch, 7)
    watch.look(between, room=room, now=8)
    assert look_until(watch, 17, begin=9) == frozenset()
    assert look_until(watch, 20, begin=18) == {TP}


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    watch = StallWatch(10)
    look_until(watch, 8)
    assert watch.look(seen(), room=True, now=68) == frozenset()
    assert look_until(watch, 77, begin=69) == frozenset()
    assert watch.look(seen(), room=True, now=78) == {TP}


@pytest.mark.parametrize(
    ("looks", "nows", "gives_up_at"),
    [
        (lambda now: (False, True, True), range(50), 11),
        (lambda now: (False, True, not 10 <= now <= 1_000), range(1_100), 1_012),
        (lambda now: (now == 110, now >= 100, True), range(200), 122),
        (lambda now: (False, True, True), (*range(10), *range(90, 150)), 101),
    ],
    ids=["silent", "Kafka is away", "never joined, then joined once more", "the process was stopped"],
)
def test_a_former_member_that_does_not_come_back_gives_up(
    looks: Callable[[int], tuple[bool, bool, bool]], nows: Iterable[int], gives_up_at: int
) -> None:
    """`looks`: whether it is a member, whether it was one, whether Kafka answers."""
    watch = JoinWatch(10)

    def gives_up(now: int) -> bool:
        joined, was_member, answers = looks(now)
        return watch.look(joined=joined, was_member=was_member, broker_answers=answers, now=now)

    assert next(filter(gives_up, nows)) == gives_up_at


Look = tuple[float, int, bool]
"""Age of the oldest record without an acknowledgement, acknowledgements so far, and whether Kafka answers."""


@pytest.mark.parametrize(
    ("looks", "nows", "gives_up_at"),
    [
        (lambda now: (now, 0, True), range(100), 10),
        (lambda now: (now, now // 9, True), range(100), 52),  # of many records one has no report at all
        (lambda now: (now % 9, now // 9, True), range(100), None),
        (lambda now: (0.0, 0, True), range(100), None),  # nothing is under way
        (lambda now: (now % 50, 0, False), range(100), None),
        (lambda now: (now % 50, 0, now >= 20), range(100), 29),
        (lambda now: (now, 0, True), (*range(9), *range(108, 120)), 111),
    ],
    ids=["silent", "one never ends", "moves", "idle", "Kafka is away", "Kafka is back", "the process was stopped"],
)
def test_deliveries_that_only_a_new_process_can_end(
    looks: Callable[[int], Look], nows: Iterable[int], gives_up_at: int | None
) -> None:
    """Nothing is acknowledged for 10 seconds; a record is overdue after 50, and for 3 more."""
    watch = DeliveryWatch(10, longest_s=50, margin_s=3)
    assert next((now for now in nows if watch.look(*looks(now), now=now)), None) == gives_up_at
