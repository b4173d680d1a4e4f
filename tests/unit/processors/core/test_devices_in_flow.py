"""Several devices in the flow: a grant on each of N for one engine, and devices that cannot be measured any more."""

from __future__ import annotations

from typing import Any

import pytest

from card_driver import GB, Card, gb, spec
from flow_driver import HIGH, LOW
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.residents import Needs
from penstock.processors.core.flow import Flow
from penstock.processors.core.work.suspects import clear_suspicion, suspect_all
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import InsufficientCapacity
from penstock.schemas.records import Requirements


class Fleet(Card):
    """Simulated devices of these sizes. Each model takes memory of one or more of them."""

    def __init__(self, *sizes_gb: int, **models: tuple[int, int]) -> None:
        """By model: bytes of each device in GB, and how many devices."""
        self.sizes_gb = {f"sim{number}": size for number, size in enumerate(sizes_gb)}
        self.foreign = dict.fromkeys(self.sizes_gb, 0)
        needs = {name: gb(size) for name, (size, _) in models.items()}
        super().__init__(0, needs, specs=[spec(name, count=count) for name, (_, count) in models.items()])

    def make_flow(self, *args: Any) -> Flow:
        sizes = self.sizes_gb.items()
        cards = [DeviceCapacity(device=name, kind="simulated", total_bytes=size * GB) for name, size in sizes]
        return Flow(*args, devices=cards)

    def observe(self, *unread: str, **foreign_gb: int) -> None:
        self.foreign |= {name: size * GB for name, size in foreign_gb.items()}
        held = {name: self.flow.ledger.reserved_bytes(name) for name in self.sizes_gb if name not in unread}
        observed = {name: (taken + self.foreign[name], taken) for name, taken in held.items()}
        self.flow.measurements.observed(observed, self.now)
        self.flow.measurements.unread(unread)
        self.settle()

    def each_free_gb(self) -> list[int]:
        return [self.flow.ledger.free_bytes(name) // GB for name in self.sizes_gb]


def test_an_engine_on_two_devices_has_a_grant_on_each_and_gives_both_back() -> None:
    world = Fleet(80, 80, 80, tp=(50, 2), small=(40, 1))
    world.submit("s", model="small")
    world.submit("t", model="tp")
    world.pass_steps(0.5)
    assert set(world.running) == {"s", "t"}
    (load,) = [one for one in world.effects(ask.Load) if one.model == "tp"]
    assert (load.bytes, len(set(load.devices)), load.device) == (50 * GB, 2, load.devices[0])
    assert sorted(world.each_free_gb()) == [30, 30, 40]
    (replica,) = world.flow.lane("tp").replicas.values()
    measured = {("tp", 0): {load.devices[0]: 45 * GB, load.devices[1]: 60 * GB}}
    world.flow.measurements.observed({}, world.now, measured)
    assert replica.measured_bytes == 45 * GB
    holders = {name: world.flow.ledger.holders(name) for name in load.devices}
    assert [one.measured_bytes for name in load.devices for one in holders[name]] == [45 * GB, 60 * GB]
    assert world.flow.ledger.free_bytes(load.devices[1]) == 20 * GB, "what it takes beyond its grant is nobody's"
    world.finish("t")
    world.flow.orders.desire("tp", False, None)
    world.pass_steps(0.5)
    assert sorted(world.each_free_gb()) == [40, 80, 80]


def test_a_run_on_two_devices_is_granted_its_memory_on_each() -> None:
    world = Fleet(80, 80, tp=(50, 2), small=(25, 1))
    large = Requirements(vram_bytes=75 * GB)
    world.submit("t", model="tp", requirements=large)
    world.pass_steps(0.5)
    assert set(world.running) == {"t"}
    assert world.each_free_gb() == [5, 5]
    measured = {("tp", 0): {"sim0": 70 * GB, "sim1": 70 * GB}}
    world.flow.measurements.observed({}, world.now, measured)
    assert world.each_free_gb() == [5, 5], "what its run takes is granted already"
    world.finish("t")
    assert world.each_free_gb() == [30, 30]
    world.submit("s", model="small")
    world.pass_steps(0.5)
    assert sorted(world.each_free_gb()) == [5, 30]
    work = world.submit("again", model="tp", requirements=large)
    world.pass_steps(0.5)
    assert set(world.running) == {"s"}, "the device that is short may be the second one"
    explained = world.flow.waiting_for(work, world.now)
    assert (explained.reason, explained.need_bytes, explained.free_bytes) == ("memory", 25 * GB, 5 * GB)
    world.finish("s")
    world.pass_steps(30.0)
    assert set(world.running) == {"again"}, "the other model was given up for it"
    world.finish("again")
    assert world.each_free_gb() == [30, 30]


class ThroughHost(Card):
    """A card of 80 GB and main memory of 20 GB, of which others use 4."""

    def make_flow(self, *args: Any) -> Flow:
        card = DeviceCapacity(device="sim", kind="simulated", total_bytes=80 * GB)
        return Flow(*args, devices=[card, DeviceCapacity(device="cpu", kind="cpu", total_bytes=20 * GB)])

    def observe(self, foreign_gb: int = 4) -> None:
        self.flow.measurements.observed({"sim": (0, 0), "cpu": (foreign_gb * GB, 0)}, self.now)
        self.settle()


@pytest.mark.parametrize(("weights_gb", "booked_gb"), [(8, 8), (40, 10)])
def test_main_memory_is_booked_while_weights_pass_through_it(weights_gb: int, booked_gb: int) -> None:
    """Of weights that are larger than half of it that half: their file's pages come and go."""
    needs = Needs(load_bytes=60 * GB, host_bytes=weights_gb * GB, exact=True)
    world = ThroughHost(80, {"m": needs}, by_hand=True)
    world.submit("r")
    assert world.slow_loads == [("m", 0)]
    assert world.flow.ledger.free_bytes("cpu") // GB == 16 - booked_gb
    world.loaded("m", 0)
    world.settle()
    assert set(world.running) == {"r"}
    assert world.flow.ledger.free_bytes("cpu") // GB == 16


def test_all_or_nothing_it_waits_until_enough_devices_have_room() -> None:
    world = Fleet(80, 80, tp=(50, 2))
    world.observe(sim1=40)
    world.submit("t")
    world.pass_steps(1.0)
    assert not world.running
    assert world.each_free_gb() == [80, 40], "nothing is held while it waits"
    (work,) = world.flow.works.values()
    explained = world.flow.waiting_for(work, world.now)
    assert (explained.reason, explained.need_bytes, explained.free_bytes) == ("memory", 50 * GB, 40 * GB)
    world.observe(sim1=20)
    world.pass_steps(1.0)
    assert set(world.running) == {"t"}


def test_others_are_given_up_on_both_devices_for_it() -> None:
    world = Fleet(80, 80, tp=(50, 2), a=(60, 1), b=(60, 1))
    for name in ("a", "b"):
        world.submit(name, model=name)
        world.finish(name)
    world.pass_steps(30.0)
    world.submit("t", model="tp")
    world.pass_steps(2.0)
    assert set(world.running) == {"t"}
    assert sorted(model for model, _, _ in world.unloads) == ["a", "b"]


def test_more_devices_than_there_are_is_refused_at_once() -> None:
    world = Fleet(80, 80, tp=(50, 3))
    world.submit("t")
    work = world.submit("again")
    assert isinstance(work.outcome.error, InsufficientCapacity)
    assert str(work.outcome.error) == "tp needs 51200 MiB on each of 3 devices; 2 can grant that"
    assert work.outcome.error.details == {"need": 150 * GB, "capacity": 100 * GB, "unit": "bytes"}


def test_on_a_device_that_is_not_measured_nothing_is_granted_and_what_runs_goes_on() -> None:
    world = Fleet(80, a=(50, 1), c=(50, 1))
    world.submit("a", model="a")
    world.pass_steps(0.5)
    world.observe("sim0")
    assert set(world.running) == {"a"}
    world.finish("a")
    world.submit("a2", model="a")
    assert "a2" in world.running, "what is loaded serves on"
    world.finish("a2")
    world.pass_steps(30.0)
    world.submit("c", model="c")
    world.pass_steps(30.0)
    assert "c" not in world.running
    assert world.unloads == [], "nothing is given up where nothing could be loaded"
    world.observe()
    world.pass_steps(5.0)
    assert "c" in world.running


def on_both() -> tuple[Fleet, Lane]:
    """The model is loaded on both devices, of which only the first holds a large run beside it, and has run once."""
    world = Fleet(100, 90, m=(45, 1))
    world.configure(m=spec("m", min_replicas=2, max_replicas=2))
    world.submit("first")
    world.pass_steps(1.0)
    world.finish("first")
    lane = world.flow.lane("m")
    assert [one.device for one in lane.ready] == ["sim0", "sim1"]
    return world, lane


def kept_for(world: Fleet, replica: Replica, vram_gb: int) -> Work:
    """A suspect that needs so much memory, for which this replica is kept."""
    work = world.submit("suspect", requirements=Requirements(vram_bytes=vram_gb * GB), settle=False)
    suspect_all([work, work])
    replica.exclusive = work.group
    return work


@pytest.mark.parametrize(("vram_gb", "foreign_gb"), [(98, 0), (60, 40)], ids=["never", "not now"])
def test_a_suspect_goes_apart_where_its_run_can_be_held(vram_gb: int, foreign_gb: int) -> None:
    """Found by the simulator (seed 7005): a replica was kept for it alone whose device could not hold its run."""
    world, lane = on_both()
    world.observe(sim1=foreign_gb)
    work = kept_for(world, lane.ready[1], vram_gb)
    world.pass_steps(3.0)
    assert set(world.running) == {"suspect"}
    assert work.run.replica == 0


def test_a_suspect_that_goes_apart_leaves_the_others_of_its_group_by_themselves() -> None:
    """Found by the simulator (seed 4470): an innocent run started beside a suspect that had lost its replica."""
    world, lane = on_both()
    world.flow.replicas.limits("m", 0, 4, world.now)
    world.flow.replicas.limits("m", 1, 2, world.now)
    small = world.submit("small", settle=False)
    large = world.submit("large", requirements=Requirements(vram_bytes=98 * GB), settle=False)
    others = [world.submit(name, settle=False) for name in ("a", "b")]
    suspect_all([small, large, *others])
    for one in others:
        clear_suspicion(one)
    assert small.group is large.group
    lane.ready[1].exclusive = small.group
    world.pass_steps(0.5)
    world.submit("late")
    world.pass_steps(0.5)
    beside = [work.request_id for one in lane.ready for work in one.holders if small in one.holders]
    assert beside == ["small"]


def test_the_largest_device_is_never_taken_for_too_small() -> None:
    """Found by the simulator (seed 31492): an engine that had grown there seemed to fit a smaller device better, each
    was given up for the other, and the model was loaded and unloaded for ever."""
    world = Fleet(100, 90, m=(45, 1))
    world.submit("first")
    world.pass_steps(1.0)
    lane = world.flow.lane("m")
    (replica,) = lane.ready
    assert replica.device == "sim0"
    world.finish("first")
    assert replica.grant is not None
    replica.measured_bytes = replica.least_bytes + 20 * GB
    world.flow.ledger.measure(replica.grant, "sim0", replica.measured_bytes)
    run_bytes = 89 * GB - replica.least_bytes  # it would fit the smaller one, had the engine not grown
    world.submit("large", requirements=Requirements(vram_bytes=replica.bytes + run_bytes))
    world.pass_steps(3.0)
    assert lane.too_small == set()
    assert world.status_of("large") == "failed"
    assert world.unloads == []


def test_the_first_that_waits_for_memory_is_refused_when_its_model_has_grown_too_large_for_it() -> None:
    """Only who came first in the last walk of the queue was looked at: the other kept memory from all for ever."""
    world = Fleet(80, m=(25, 1))
    world.observe(sim0=30)
    for name, klass, need_gb in (("large", LOW, 45), ("small", HIGH, 35)):
        work = world.submit(name, klass, settle=False)
        work.memory_bytes = need_gb * GB
        world.pass_steps(0.5)
    assert not world.running
    (waiter,) = world.flow.run_memory.waiters.values()
    assert waiter.work.request_id == "large"
    world.flow.measurements.observed({"sim0": (70 * GB, 40 * GB)}, world.now, {("m", 0): {"sim0": 40 * GB}})
    world.pass_steps(1.0)
    assert world.status_of("large") == "failed"
    world.observe(sim0=0)
    assert set(world.running) == {"small"}


def test_memory_is_said_to_be_short_where_the_model_may_be_loaded() -> None:
    """A device that is too small for a run of the model was named: more was free there than was needed."""
    world = Fleet(80, 80, m=(50, 1))
    world.flow.lane("m").too_small.add("sim0")
    world.observe(sim1=60)
    work = world.submit("r")
    world.pass_steps(1.0)
    explained = world.flow.waiting_for(work, world.now)
    assert (explained.reason, explained.need_bytes, explained.free_bytes) == ("memory", 50 * GB, 20 * GB)
