"""The stall watch: only a partition with lag, unpaused, with room in intake and an unmoving position is a stall."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.processors.kafka.batches import Progress
from penstock.processors.kafka.watchdog import DeliveryWatch, JoinWatch, StallWatch

TP = ("t", 0)


def seen(position: int = 5, highwater: int | None = 9, *, paused: bool = False) -> dict[tuple[str, int], Progress]:
    return {TP: Progress(position=position, highwater=highwater, paused=paused)}


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
def test_these_are_no_stalls(between: dict[tuple[str, int], Progress], room: bool) -> None:
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


def joins_by(watch: JoinWatch, begin: int, until: int, *, answers: bool = True, joined: bool = False) -> bool:
    """Whether it gave up while it looked each second."""
    looks = range(begin, until + 1)
    return any(watch.look(joined=joined, was_member=True, broker_answers=answers, now=now) for now in looks)


def test_a_former_member_that_does_not_come_back_gives_up() -> None:
    watch = JoinWatch(10)
    assert not joins_by(watch, 0, 10)
    assert joins_by(watch, 11, 11)


def test_while_kafka_is_away_nobody_gives_up() -> None:
    watch = JoinWatch(10)
    assert not joins_by(watch, 0, 9)
    assert not joins_by(watch, 10, 1_000, answers=False)
    assert not joins_by(watch, 1_001, 1_011)
    assert joins_by(watch, 1_012, 1_012)


def test_who_has_joined_or_never_did_is_not_given_up() -> None:
    watch = JoinWatch(10)
    assert not any(watch.look(joined=False, was_member=False, broker_answers=True, now=now) for now in range(100))
    assert not joins_by(watch, 100, 109)
    assert not joins_by(watch, 110, 110, joined=True)
    assert not joins_by(watch, 111, 121)
    assert joins_by(watch, 122, 122)


def test_a_process_that_was_stopped_has_time_to_join() -> None:
    watch = JoinWatch(10)
    assert not joins_by(watch, 0, 9)
    assert not joins_by(watch, 90, 100)
    assert joins_by(watch, 101, 101)


Look = tuple[float, int, bool]
"""Age of the oldest record without an acknowledgement, acknowledgements so far, and whether Kafka answers."""


@pytest.mark.parametrize(
    ("looks", "gives_up_at"),
    [
        (lambda now: (now, 0, True), 10),
        (lambda now: (now, now // 9, True), 52),  # of many records one has no report at all
        (lambda now: (now % 9, now // 9, True), None),
        (lambda now: (0.0, 0, True), None),  # nothing is under way
        (lambda now: (now % 50, 0, False), None),
        (lambda now: (now % 50, 0, now >= 20), 29),
    ],
    ids=["silent", "one never ends", "moves", "idle", "Kafka is away", "Kafka is back"],
)
def test_deliveries_that_only_a_new_process_can_end(looks: Callable[[int], Look], gives_up_at: int | None) -> None:
    """Nothing is acknowledged for 10 seconds; a record is overdue after 50, and for 3 more."""
    watch = DeliveryWatch(10, longest_s=50, margin_s=3)
    found = [now for now in range(100) if watch.look(*looks(now), now=now)]
    assert (found[0] if found else None) == gives_up_at


def test_deliveries_are_not_overdue_because_the_process_was_stopped() -> None:
    watch = DeliveryWatch(10, longest_s=50, margin_s=3)
    assert not any(watch.look(now, 0, True, now=now) for now in (*range(9), *range(108, 111)))
    assert watch.look(111.0, 0, True, now=111)
