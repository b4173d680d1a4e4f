"""The stall watch: only a partition with lag, unpaused, with room in intake and an unmoving position is a stall."""

from __future__ import annotations

import pytest

from penstock.processors.kafka.membership import Progress
from penstock.processors.kafka.watchdog import StallWatch

TP = ("t", 0)


def seen(
    position: int | None = 5, highwater: int | None = 9, *, paused: bool = False
) -> dict[tuple[str, int], Progress]:
    return {TP: Progress(position=position, highwater=highwater, paused=paused)}


def test_lag_without_movement_is_a_stall_after_the_limit() -> None:
    watch = StallWatch(10)
    assert watch.look(seen(), room=True, now=0) == frozenset()
    assert watch.look(seen(), room=True, now=9.9) == frozenset()
    assert watch.look(seen(), room=True, now=10) == {TP}


def test_a_position_never_known_is_a_stall_too() -> None:
    watch = StallWatch(10)
    watch.look(seen(None, None), room=True, now=0)
    assert watch.look(seen(None, None), room=True, now=11) == {TP}


@pytest.mark.parametrize(
    ("between", "room"),
    [(seen(6), True), (seen(paused=True), True), (seen(), False), (seen(9, 9), True), ({}, True)],
    ids=["moved", "paused", "no room", "no lag", "not owned"],
)
def test_these_are_no_stalls(between: dict[tuple[str, int], Progress], room: bool) -> None:
    watch = StallWatch(10)
    watch.look(seen(), room=True, now=0)
    watch.look(between, room=room, now=8)
    assert watch.look(seen(), room=True, now=12) == frozenset()
