"""Orders that meet a load, a size, another kind of engine, a pause or a suspect."""

from __future__ import annotations

import pytest

from card_driver import Card, card, gb, spec
from flow_driver import HIGH, LOW, World
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.core.work.states import Stage
from penstock.schemas.errors import EngineFailed


def loading(*, total_gb: int = 80, **models: float) -> Card:
    """A card on which loads are answered by hand; the first model is loading."""
    world = Card(total_gb, {name: gb(size) for name, size in models.items()}, by_hand=True)
    world.flow.orders.want(next(iter(models)))
    world.settle()
    assert world.slow_loads == [(next(iter(models)), 0)]
    return world


def test_a_remote_model_is_replaced_by_a_local_one_while_its_runs_end() -> None:
    """The remote server answered for ever; and both had number 0, so the local one waited for memory until then."""
    world = Card(80, {"a": gb(10)}, specs=[spec("a", devices=(), options="remote")])
    world.submit("before")
    world.pass_steps(0.5)
    assert "before" in world.running
    world.configure(a=spec("a", options="local"))
    world.submit("after")
    world.pass_steps(5)
    assert not world.unloads, "what runs may end"
    assert set(world.running) == {"before", "after"}
    world.finish("before")
    world.pass_steps(5)
    assert [reason for _, _, reason in world.unloads] == ["replaced"]
    assert [replica.device for replica in world.flow.lane("a").replicas.values()] == ["sim"]


@pytest.mark.parametrize("order", ["remove", "unload", "replace"])
def test_an_order_ends_a_load(order: str) -> None:
    """It went on to its end, and its memory was booked so long."""
    world = loading(total_gb=10, a=8, b=8)
    world.submit("waits", model="b")
    if order == "remove":
        world.specs.pop("a")
        world.configure()
    elif order == "unload":
        world.flow.orders.desire("a", False, None, 5)
    else:
        world.flow.orders.desire("a", None, None, -1)
        world.configure(a=spec("a", options="new"))
    world.pass_steps(1)
    assert world.unloads[0][:2] == ("a", 0)
    assert world.slow_loads[1] == ("b", 0), "somebody waits for this one"


@pytest.mark.parametrize("error", [EngineFailed("it hung"), CannotLoad("it is broken")])
def test_a_model_that_was_ordered_to_be_unloaded_has_not_failed(error: Exception) -> None:
    """It stayed failed, and /readyz degraded."""
    world = loading(a=10)
    world.load_failed(error, "a")
    assert world.flow.lane("a").state == "failed"
    world.flow.orders.desire("a", False, None, 5)
    world.pass_steps(60)
    assert (world.flow.lane("a").state, world.flow.lane("a").why_not_ready) == ("absent", None)


def test_the_failure_of_a_load_that_was_ordered_to_end_is_nobodys() -> None:
    """It counted against the new entry, and failed those who waited for it."""
    world = loading(a=10)
    world.submit("waits")
    world.hold_answers = {ask.Unload}
    world.configure(a=spec("a", options="new"))
    world.load_failed(CannotLoad("the former files are broken"), "a")
    lane = world.flow.lane("a")
    assert (lane.failures, lane.last_error, world.status_of("waits")) == (0, None, None)
    assert world.slow_loads == [("a", 0), ("a", 1)], "the new one is loaded"


def test_the_size_of_a_former_entry_says_nothing() -> None:
    world = Card(80, {"a": gb(10)}, seen=False)
    world.hold_answers = {ask.Size}
    world.configure()
    world.observe()
    world.submit("waits")
    world.configure(a=spec("a", options="new"))
    world.hold_answers = set()
    world.flow.replicas.size_failed("a", CannotLoad("no such folder"), world.now)
    world.settle()
    world.pass_steps(0.5)
    assert "waits" in world.running


def test_a_model_that_never_fits_fails_its_requests_after_a_change_of_another_kind_too() -> None:
    """That it never fits was forgotten, and not found out again: what came then waited for memory for ever."""
    world = card(80, a=gb(100))
    world.submit("first")
    world.pass_steps(0.5)
    world.configure(a=spec("a", priority=2.0))
    world.submit("second")
    world.pass_steps(5)
    assert [world.status_of(name) for name in ("first", "second")] == ["failed", "failed"]


def test_a_suspect_of_a_paused_class_waits() -> None:
    world = World("m")
    world.up("m", slots=4)
    for number in range(4):
        world.submit(f"r{number}", LOW if number == 3 else HIGH)
    world.flow.orders.pause("class", LOW, True)
    world.die("m")
    world.started.clear()
    world.up("m", slots=4)
    for _ in range(20):
        world.pass_time(0.5)
        for name in list(world.running):
            world.finish(name)
    assert sorted(world.started) == ["r0", "r1", "r2"]
    world.flow.orders.pause("class", LOW, False)
    world.pass_time(0.5)
    assert "r3" in world.running


def test_a_parked_request_that_must_run_alone_is_read_at_once() -> None:
    """Only the first of its class were read again: it kept all others waiting for a minute, and again."""
    world = World("m", intake_bytes=1_600_000, aging_s=2.0)
    world.died_of = {"suspect": 2}
    world.submit("fills the share", LOW, size=190_000, ttl_ms=2_000_000, settle=False)
    suspect = world.submit("suspect", LOW, size=20_000, ttl_ms=3_600_000, settle=False)
    for number in range(300):
        world.submit(f"low{number}", LOW, size=1_000, ttl_ms=3_000_000, settle=False)
    for number in range(200):
        world.submit(f"high{number}", HIGH, size=10, settle=False)
    world.settle()
    assert suspect.stage is Stage.PARKED
    world.up("m", slots=1, inline=True)
    idle = 0
    while world.status_of("suspect") is None:
        world.pass_time(0.1)
        idle = 0 if world.running else idle + 1
        assert idle < 20, f"nothing has run for two seconds: {suspect} has the claim"
        for name in list(world.running):
            world.finish(name)


@pytest.mark.parametrize("order", ["unload", "remove"])
def test_a_model_that_is_wanted_again_while_it_is_unloaded_is_loaded(order: str) -> None:
    world = Card(15, {"a": gb(10)})
    world.submit("r")
    world.pass_steps(0.3)
    world.finish("r")
    world.hold_answers = {ask.Unload}
    if order == "unload":
        world.flow.orders.desire("a", False, None, 1)
    else:
        entry = world.specs.pop("a")
        world.configure()
        world.specs["a"] = entry
    world.settle()
    world.pass_steps(0.3)
    world.configure()
    world.flow.orders.desire("a", None, None, -1)
    world.flow.orders.want("a")
    world.pass_steps(0.3)
    assert world.loads == ["a"]
    world.release(ask.Unload)
    world.pass_steps(5)
    assert world.ready("a")


def test_the_first_order_on_a_topic_that_was_made_anew_is_followed() -> None:
    """Its offset was also the revision that stands for no order at all."""
    world = card(80, a=gb(10))
    world.flow.orders.desire("a", True, None, -1)
    world.pass_steps(0.5)
    assert world.ready("a") == [0]
    world.flow.orders.desire("a", False, None, 0)
    world.pass_steps(2)
    assert world.ready("a") == []


def test_a_server_that_is_busy_is_waited_for_in_the_estimate() -> None:
    world = World("m")
    world.up("m", slots=1, inline=True)
    for number in range(3):
        world.submit(f"r{number}")
        world.pass_time(1.0)
        world.finish(f"r{number}")
    world.flow.replicas.busy("m", 0, 600.0, world.now)
    work = world.submit("waits")
    world.pass_time(1)
    starts_at = world.flow.waiting_for(work, world.now).estimated_start_at
    assert starts_at is not None
    assert 598_000 <= starts_at - world.wall_ms <= 600_000
    world.flow.replicas.busy("m", 0, float("inf"), world.now)
    assert world.flow.waiting_for(work, world.now).estimated_start_at is None


def test_a_model_that_is_added_again_begins_without_its_former_failures() -> None:
    world = loading(a=10)
    for _ in range(4):
        world.flow.replicas.load_failed("a", 0, EngineFailed("no"), world.now)
        world.flow.orders.want("a")
        world.pass_steps(12)
    assert world.flow.lane("a").failures >= 3
    entry = world.specs.pop("a")
    world.configure()
    world.configure(a=entry)
    assert world.flow.lane("a").failures == 0


def test_nothing_is_kept_or_drained_for_a_model_that_is_paused() -> None:
    world = Card(10, {"a": gb(8), "b": gb(8)})
    world.submit("runs", LOW, model="a")
    world.pass_steps(3)
    world.submit("waits", HIGH, model="b")
    world.pass_steps(3)
    assert world.flow.lane("a").replicas[0].state == "draining"
    world.flow.orders.pause("model", "b", True)
    world.submit("next", LOW, model="a")
    world.pass_steps(3)
    assert world.flow.lane("b").why_not_ready is None, "it does not wait for memory"
    world.finish("runs")
    world.pass_steps(1)
    assert "next" in world.running
    assert world.loads.count("a") == 1


def order_end(world: Card, order: str) -> None:
    """Order the end of the replicas of model a; the flow has not taken its next step yet."""
    if order == "unload":
        world.flow.orders.desire("a", False, None, 5)
        return
    changed = {} if order == "remove" else {"a": spec("a", devices=world.specs["a"].devices, options="new")}
    world.flow.orders.configure(changed, world.now)


@pytest.mark.parametrize("devices", [("simulated",), ()])
@pytest.mark.parametrize("order", ["remove", "unload", "replace"])
def test_a_replica_that_is_ordered_to_end_takes_no_more_runs_in_the_same_turn(
    order: str, devices: tuple[str, ...]
) -> None:
    """Lanes are looked at before placement is asked: what came in the turn of the order ran on the old engine."""
    world = Card(80, {"a": gb(10)}, slots=4, specs=[spec("a", devices=devices)])
    world.submit("before")
    world.pass_steps(0.3)
    assert world.running.keys() == {"before"}
    world.hold_answers = {ask.Load}
    order_end(world, order)
    world.submit("after")
    assert world.running.keys() == {"before"}, "it runs on the engine that was ordered to end"
    assert world.flow.lane("a").replicas[0].state == "draining"


@pytest.mark.parametrize("devices", [("simulated",), ()])
@pytest.mark.parametrize("order", ["remove", "unload", "replace"])
def test_a_load_that_was_ordered_to_end_and_ends_in_the_same_turn_takes_no_runs(
    order: str, devices: tuple[str, ...]
) -> None:
    world = Card(80, {"a": gb(10)}, slots=4, specs=[spec("a", devices=devices)], by_hand=True)
    world.submit("waits")
    world.pass_steps(0.3)
    assert world.slow_loads == [("a", 0)]
    order_end(world, order)
    world.loaded("a", 0)
    world.settle()
    assert not world.running
    assert world.unloads[0][:2] == ("a", 0)


@pytest.mark.parametrize("devices", [("simulated",), ()])
def test_a_preloaded_model_that_is_replaced_while_it_is_loaded_is_loaded_anew(devices: tuple[str, ...]) -> None:
    """Nobody asks for it: the end of its former load also took back that it is to be loaded."""
    world = Card(80, {"a": gb(10)}, specs=[spec("a", devices=devices)], by_hand=True)
    world.flow.orders.want("a")
    world.pass_steps(0.3)
    assert world.slow_loads == [("a", 0)]
    world.configure(a=spec("a", devices=devices, options="new"))
    world.pass_steps(1)
    assert len(world.slow_loads) == 2, "the new one"
    assert world.flow.lane("a").wanted
