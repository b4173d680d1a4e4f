"""A run that needs most of a card, beside small ones that follow each other without end: who waits how long."""

from __future__ import annotations

import pytest

from card_driver import GB, Card, gb
from penstock.processors.core.work.work import Work
from penstock.schemas.records import Requirements

STEP_S = 0.1
RESERVE_AFTER_S = 5.0
BOUND_S = 10.0
"""The set bound: so long room is kept from small ones, at first."""


class Stream(Card):
    """80 GB; two models of 5 GB; on one of them three small runs of 20 GB at a time, each of `small_s` seconds.

    Whenever one ends the next one is there. `held`: seconds for which no small one was started though slots were free.
    """

    def __init__(self, small_s: float, large_s: float = 2.0) -> None:
        super().__init__(80, {"a": gb(5), "b": gb(5, run=20)}, slots=3, longest_reservation_s=BOUND_S)
        self.small_s, self.large_s = small_s, large_s
        self.number = 0
        self.began: dict[str, float] = {}
        self.held: list[tuple[float, float]] = []
        self.start_s = self.now

    @property
    def at(self) -> float:
        return round(self.now - self.start_s, 3)

    def large(self, name: str) -> Work:
        return self.submit(name, model="a", requirements=Requirements(vram_bytes=70 * GB))

    def go_on(self, seconds: float) -> None:
        self.pass_steps(seconds, STEP_S, self.look)

    def look(self) -> None:
        for name in list(self.running):
            self.began.setdefault(name, self.at)
            if self.at - self.began[name] >= self.length_s(name) - 1e-6:
                self.finish(name)
        while sum(name.startswith("s") for name in self.waiting()) < 3:
            self.number += 1
            self.submit(f"s{self.number}", model="b")
        for name in self.running:
            self.began.setdefault(name, self.at)
        if self.small_runs() == 3 or self.large_runs():
            self.held.append((self.at, self.at))
        else:
            self.held[-1] = (self.held[-1][0], self.at)

    def length_s(self, name: str) -> float:
        """The first ones are shorter: so they do not all end at the same time."""
        if not name.startswith("s"):
            return self.large_s
        return self.small_s * min(1.0, int(name[1:]) / 3)

    def waiting(self) -> list[str]:
        return [work.request_id for work in self.flow.works.values() if work.request_id not in self.running]

    def small_runs(self) -> int:
        return sum(name.startswith("s") for name in self.running)

    def large_runs(self) -> int:
        return sum(not name.startswith("s") for name in self.running)

    def longest_held_s(self) -> float:
        return max(until - since for since, until in self.held)


def test_small_ones_pass_at_first_then_leave_room_and_the_large_one_runs() -> None:
    world = Stream(small_s=1.0)
    world.go_on(3.0)
    world.large("large")
    world.go_on(RESERVE_AFTER_S - STEP_S)
    assert world.small_runs() == 3, "they pass"
    world.go_on(1.0 + 3 * STEP_S)
    assert "large" in world.running
    assert 8.0 < world.began["large"] <= 9.0 + 2 * STEP_S, "it came at 3; room was kept from 8 on, a small one takes 1"
    assert world.longest_held_s() <= 1.0 + STEP_S, "for as long as one of them runs, of ten seconds that it may"
    world.go_on(world.large_s + 2 * STEP_S)
    assert world.small_runs() == 3
    assert world.status_of("large") == "completed"
    assert world.free_gb == 80 - 2 * 5 - 3 * 20


def test_two_large_ones_hold_small_ones_up_no_longer_than_one() -> None:
    world = Stream(small_s=1.0)
    world.go_on(3.0)
    world.large("large")
    world.large("other")
    world.go_on(30.0)
    assert world.status_of("large") == world.status_of("other") == "completed"
    ended = world.began["large"] + world.large_s
    assert world.began["other"] - ended <= RESERVE_AFTER_S + world.small_s + 3 * STEP_S
    assert world.longest_held_s() <= 1.0 + STEP_S
    assert world.small_runs() == 3


@pytest.mark.parametrize("when_s", [1.0, RESERVE_AFTER_S + 2.0])
def test_a_large_one_that_is_cancelled_gives_back_what_was_kept_for_it_at_once(when_s: float) -> None:
    world = Stream(small_s=6.0)
    world.go_on(3.0)
    world.large("large")
    world.go_on(when_s)
    kept = when_s > RESERVE_AFTER_S
    assert (world.flow.ledger.reservation("sim", world.now) is not None) == kept
    world.cancel("large")
    assert world.flow.ledger.reservation("sim", world.now) is None
    assert not world.flow.run_memory.waiters
    assert world.small_runs() == 3, "they start in the same moment"
    world.go_on(20.0)
    assert world.small_runs() == 3


def test_small_ones_that_run_longer_than_the_bound_wait_no_longer_than_it() -> None:
    """The first reservation is too short: they pass for as long, the next one lasts twice as long, and is enough."""
    world = Stream(small_s=15.0)
    world.go_on(1.0)
    world.go_on(3.0)
    world.large("large")
    world.go_on(RESERVE_AFTER_S + BOUND_S + 1.0)
    assert world.small_runs() > 0
    first = world.longest_held_s()
    assert first <= BOUND_S + STEP_S
    world.go_on(4 * BOUND_S)
    assert world.status_of("large") == "completed"
    assert world.longest_held_s() <= 2 * BOUND_S + STEP_S
    world.go_on(5.0)
    assert world.small_runs() == 3


def test_a_large_one_and_small_ones_of_the_same_model_do_not_share_what_is_kept() -> None:
    world = Stream(small_s=1.0)
    world.go_on(3.0)
    world.submit("large", model="b", requirements=Requirements(vram_bytes=70 * GB))
    world.go_on(1.0 + RESERVE_AFTER_S + 1.0 + 4 * STEP_S)
    assert "large" in world.running, "a second until a slot is free, then as beside another model"
