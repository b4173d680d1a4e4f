"""What engines were measured to hold, in the flow: what is booked now, and what the next load is granted."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import World
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import DeviceCapacity, OutOfMemory
from penstock.processors.core.fleet.replicas import LIVED
from penstock.processors.core.fleet.residents import ModelSpec, Needs
from penstock.processors.core.flow import Flow

MB = 1 << 20


class Host(World):
    """One model in main memory. It is measured when the test says so."""

    def __init__(self, *, load_mb: int = 100, total_mb: int = 1000, shape: tuple[float, ...] = (8.0,)) -> None:
        self.needs = Needs(load_bytes=load_mb * MB, shape=shape)
        self.total_mb = total_mb
        self.errors: list[tuple[int, int]] = []
        self.granted: list[int] = []
        self.load_error: Exception | None = None
        super().__init__("m")
        self.flow.orders.configure({"m": ModelSpec(model="m", devices=("cpu",))}, self.now)
        self.observe()

    def make_flow(self, *args: Any) -> Flow:
        devices = [DeviceCapacity(device="cpu", kind="cpu", total_bytes=self.total_mb * MB)]
        return Flow(*args, devices=devices, memory_error=lambda peak, booked: self.errors.append((peak, booked)))

    def observe(self, measured_mb: int | None = None, peak_mb: int = 0) -> None:
        held = self.flow.ledger.reserved_bytes("cpu")
        measured = {} if measured_mb is None else {("m", 0): {"cpu": measured_mb * MB}}
        self.flow.measurements.observed({"cpu": (held, held)}, self.now, measured, {("m", 0): peak_mb * MB})
        self.settle()

    def answer(self, effect: Any) -> None:
        super().answer(effect)
        match effect:
            case ask.Size(model):
                self.flow.replicas.sized(model, self.needs, self.now)
            case ask.Load(model, replica, _, granted):
                self.granted.append(granted // MB)
                if self.load_error is not None:
                    self.flow.replicas.load_failed(model, replica, self.load_error, self.now)
                else:
                    self.flow.replicas.up(model, replica, 8, None, self.now, inline=True)
            case ask.Unload(model, replica):
                self.flow.replicas.gone(model, replica, self.now)
            case _:
                pass

    def live(self, *, peak_mb: int, runs: int = LIVED, name: str = "r") -> None:
        """A life from load to unload, with so many runs."""
        for number in range(runs):
            self.submit(f"{name}{number}", model="m")
            self.finish(f"{name}{number}")
        self.observe(peak_mb // 2, peak_mb)
        self.unload()

    def unload(self) -> None:
        self.flow.orders.desire("m", loaded=False, pinned=None)
        self.settle()
        self.flow.orders.desire("m", loaded=None, pinned=None)
        self.settle()

    def next_grant(self) -> int:
        self.submit(f"next{len(self.granted)}", model="m")
        return self.granted[-1]


def test_the_peak_of_a_whole_life_replaces_the_estimate() -> None:
    world = Host(load_mb=100)
    world.live(peak_mb=60)
    assert world.granted == [120], "an estimate has a fifth on top"
    assert world.next_grant() == 66, "what was measured has a tenth"
    assert world.errors == [(60 * MB, 120 * MB)]


def test_a_life_of_few_runs_teaches_no_lower_peak_but_a_higher_one() -> None:
    world = Host(load_mb=100)
    world.live(peak_mb=60, runs=LIVED - 1, name="a")
    assert world.next_grant() == 120
    world.finish("next1")
    world.live(peak_mb=300, runs=1, name="b")
    assert world.next_grant() == 330


def test_an_engine_that_lives_when_the_worker_stops_teaches_too() -> None:
    """Else a model that is never unloaded, as most are, would be estimated anew at each start."""
    world = Host(load_mb=100)
    for number in range(LIVED):
        world.submit(f"r{number}", model="m")
        world.finish(f"r{number}")
    world.observe(30, 60)
    world.flow.replicas.lives_end()
    (learned,) = world.flow.estimates.to_json()["learned"]
    assert [peak for _, peak, _ in learned["samples"]] == [60 * MB]


def test_a_death_teaches_no_lower_peak() -> None:
    world = Host(load_mb=100)
    for number in range(LIVED):
        world.submit(f"r{number}", model="m")
        world.finish(f"r{number}")
    world.observe(30, 60)
    world.die("m")
    world.pass_time(1.0)
    assert world.next_grant() == 120


def test_what_was_held_once_stays_booked() -> None:
    world = Host(load_mb=100)
    world.submit("r", model="m")
    world.observe(90, 200)
    assert world.flow.ledger.reserved_bytes("cpu") == 200 * MB
    (holder,) = world.flow.ledger.holders("cpu")
    assert (holder.bytes, holder.measured_bytes) == (200 * MB, 90 * MB)
    world.observe(90, 5000)
    assert world.flow.ledger.reserved_bytes("cpu") == 200 * MB, "what can never fit is not booked: it counts as overrun"


def test_other_options_are_sized_anew_and_what_was_measured_for_them_is_kept_apart() -> None:
    world = Host(load_mb=100, shape=(8.0,))
    world.live(peak_mb=60)
    world.needs = Needs(load_bytes=200 * MB, shape=(64.0,))
    world.flow.orders.configure({"m": ModelSpec(model="m", devices=("cpu",), options="more slots")}, world.now)
    assert world.next_grant() == 132, "by the ratio of what was measured to what was estimated"


@pytest.mark.parametrize("way", ["batch", "load"])
def test_running_out_of_memory_raises_what_the_next_load_gets(way: str) -> None:
    world = Host(load_mb=100)
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
    world.needs = Needs(load_bytes=100 * MB, exact=True)
    world.submit("r", model="m")
    world.flow.measurements.out_of_memory("m", 0, world.now)
    world.finish("r")
    world.live(peak_mb=60)
    world.next_grant()
    assert set(world.granted) == {100}
