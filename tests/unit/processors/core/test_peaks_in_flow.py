"""What engines were measured to hold, in the flow: what is booked now, and what the next load is granted."""

from __future__ import annotations

from typing import Any

import pytest

from card_driver import GB, Card, spec
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.core.fleet.residents import Needs
from penstock.processors.core.loading.replicas import LIVED
from penstock.schemas.errors import PenstockError


class Host(Card):
    """One model in main memory. It is measured when the test says so."""

    device = kind = "cpu"

    def __init__(self, *, load_gb: int = 100, shape: tuple[float, ...] = (8.0,)) -> None:
        self.granted: list[int] = []
        """GB of each load."""
        self.load_error: PenstockError | None = None
        super().__init__(1000, {"m": Needs(load_bytes=load_gb * GB, shape=shape)}, slots=8)

    def measure(self, measured_gb: int, peak_gb: int) -> None:
        held = self.flow.ledger.reserved_bytes("cpu")
        measured = {("m", 0): {"cpu": measured_gb * GB}}
        self.flow.measurements.observed({"cpu": (held, held)}, self.now, measured, {("m", 0): peak_gb * GB})
        self.settle()

    def answer(self, effect: Any) -> None:
        if isinstance(effect, ask.Load):
            self.granted.append(effect.bytes // GB)
            if self.load_error is not None:
                self.flow.replicas.load_failed("m", effect.replica, self.load_error, self.now)
                return
        super().answer(effect)

    def run(self, runs: int = LIVED, name: str = "r") -> None:
        for number in range(runs):
            self.submit(f"{name}{number}", model="m")
            self.finish(f"{name}{number}")

    def live(self, *, peak_gb: int, runs: int = LIVED, name: str = "r") -> None:
        """A life from load to unload, with so many runs."""
        self.run(runs, name)
        self.measure(peak_gb // 2, peak_gb)
        self.unload()

    def unload(self) -> None:
        for loaded in (False, None):
            self.flow.orders.desire("m", loaded=loaded, pinned=None)
            self.settle()

    def next_grant(self) -> int:
        self.submit(f"next{len(self.granted)}", model="m")
        return self.granted[-1]


def test_the_peak_of_a_whole_life_replaces_the_estimate() -> None:
    world = Host(load_gb=100)
    world.live(peak_gb=60)
    assert world.granted == [120], "an estimate has a fifth on top"
    assert world.next_grant() == 66, "what was measured has a tenth"
    assert world.memory_errors == [(60 * GB, 120 * GB)]


def test_a_life_of_few_runs_teaches_no_lower_peak_but_a_higher_one() -> None:
    world = Host(load_gb=100)
    world.live(peak_gb=60, runs=LIVED - 1, name="a")
    assert world.next_grant() == 120
    world.finish("next1")
    world.live(peak_gb=300, runs=1, name="b")
    assert world.next_grant() == 330


def test_an_engine_that_lives_when_the_worker_stops_teaches_too() -> None:
    """Else a model that is never unloaded, as most are, would be estimated anew at each start."""
    world = Host(load_gb=100)
    world.run()
    world.measure(30, 60)
    world.flow.replicas.lives_end()
    (learned,) = world.flow.estimates.to_json()["learned"]
    assert [peak for _, peak, _ in learned["samples"]] == [60 * GB]


def test_a_death_teaches_no_lower_peak() -> None:
    world = Host(load_gb=100)
    world.run()
    world.measure(30, 60)
    world.die("m")
    world.pass_time(1.0)
    assert world.next_grant() == 120


def test_what_was_held_once_stays_booked() -> None:
    world = Host(load_gb=100)
    world.submit("r", model="m")
    world.measure(90, 200)
    assert world.flow.ledger.reserved_bytes("cpu") == 200 * GB
    (holder,) = world.flow.ledger.holders("cpu")
    assert (holder.bytes, holder.measured_bytes) == (200 * GB, 90 * GB)
    world.measure(90, 5000)
    assert world.flow.ledger.reserved_bytes("cpu") == 200 * GB, "what can never fit is not booked: it counts as overrun"


def test_other_options_are_sized_anew_and_what_was_measured_for_them_is_kept_apart() -> None:
    world = Host(load_gb=100, shape=(8.0,))
    world.live(peak_gb=60)
    world.needs["m"] = Needs(load_bytes=200 * GB, shape=(64.0,))
    world.configure(m=spec("m", devices=("cpu",), options="more slots"))
    assert world.next_grant() == 132, "by the ratio of what was measured to what was estimated"


@pytest.mark.parametrize("way", ["batch", "load"])
def test_running_out_of_memory_raises_what_the_next_load_gets(way: str) -> None:
    world = Host(load_gb=100)
    if way == "load":
        world.load_error = OutOfMemory("no")
        world.submit("r", model="m")
        assert world.granted == [120]
        world.load_error = None
        world.pass_time(2.0)
    else:
        world.submit("r", model="m")
        world.flow.measurements.out_of_memory("m", 0, world.now)
        assert world.running.keys() == {"r"}, "it goes on in smaller batches"
        world.finish("r")
        world.unload()
        world.next_grant()
    assert world.granted == [120, 150]


def test_what_an_operator_told_is_granted_whatever_happens() -> None:
    world = Host()
    world.needs["m"] = Needs(load_bytes=100 * GB, exact=True)
    world.submit("r", model="m")
    world.flow.measurements.out_of_memory("m", 0, world.now)
    world.finish("r")
    world.live(peak_gb=60)
    world.next_grant()
    assert set(world.granted) == {100}
