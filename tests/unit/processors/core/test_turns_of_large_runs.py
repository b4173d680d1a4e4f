"""Models of which not all fit, whose runs need nearly all of the card: each gets its turn, and all runs end."""

from __future__ import annotations

from card_driver import GB, Card, gb
from penstock.processors.core.fleet.views import PlacementSettings
from penstock.schemas.records import Requirements

LARGE = Requirements(vram_bytes=70 * GB)


def test_the_run_with_which_a_model_waits_stands_for_all_that_wait_for_it() -> None:
    """Found by the simulator: in the turn of aged low work its run stood in the queue as low, and nobody for the rest.

    Models that waited to be loaded then came before it, in turns, for ever.
    """
    world = Card(80, {"a": gb(40), "b": gb(40)}, aged_share=2, aging_s=1.0)
    world.submit("b1", model="b")
    for name in ("a1", "a2"):
        world.submit(name, model="a")
        world.finish(name)
    low = world.submit("low", "low", model="a", requirements=LARGE)
    world.pass_steps(2.0)
    medium = world.submit("medium", model="a", requirements=LARGE)
    world.pass_steps(0.5)
    (waiter,) = world.flow.run_memory.waiters.values()
    assert waiter.work is low, "it is the turn of what has waited long"
    assert (waiter.klass, waiter.oldest) == ("medium", medium.arrived_at)
    world.finish("b1")
    world.pass_steps(10.0)
    assert world.started[-1] == "low"
    world.finish("low")
    world.pass_steps(10.0)
    assert world.started[-1] == "medium"


def test_a_model_that_was_loaded_runs_something_before_others_get_memory() -> None:
    """Found by the simulator (seed 10764): two models were loaded, and no run of either had memory beside both.

    The run that was first to get memory stayed the first. The model that had just been loaded stood idle for a turn,
    and was given up for that run before one of its own had started.
    """
    world = Card(100, {"a": gb(44), "b": gb(45)}, placement=PlacementSettings(aging_s=0.5))
    needs = Requirements(vram_bytes=80 * GB)
    for number in range(12):
        world.submit(f"a{number}", "low", model="a", requirements=needs)
    world.pass_steps(5.0)
    world.slow_loads = []
    world.submit("b0", "high", model="b", requirements=needs)
    for _ in range(20):
        world.pass_steps(1.0)
        for name in list(world.running):
            world.finish(name)
        if world.slow_loads:
            break
    assert world.slow_loads == [("b", 0)]
    world.pass_steps(1.0)
    assert not world.running
    assert [waiter.work.lane for waiter in world.flow.run_memory.waiters.values()] == ["a"]
    world.loaded("b", 0)
    world.pass_steps(1.0)
    assert set(world.running) == {"b0"}


def test_the_oldest_of_those_that_wait_for_memory_is_the_first_to_get_it() -> None:
    """Found by the simulator (seed 356): the younger run that was first already stayed it.

    It waited behind older models that were to be loaded, and those were given up for each other's loads for ever.
    """
    world = Card(100, {"a": gb(10), "b": gb(10), "c": gb(10)})
    needs = Requirements(vram_bytes=60 * GB)
    for model in ("a", "b", "c"):
        world.submit(f"first of {model}", model=model)
        world.finish(f"first of {model}")
    world.flow.orders.pause("model", "b", True)
    world.submit("old", model="b", requirements=needs)
    world.pass_steps(1.0)
    world.submit("runs", model="c", requirements=needs)
    world.pass_steps(1.0)
    world.submit("young", model="a", requirements=needs)
    world.pass_steps(1.0)
    assert [waiter.work.request_id for waiter in world.flow.run_memory.waiters.values()] == ["young"]
    world.flow.orders.pause("model", "b", False)
    world.pass_steps(6.0)
    assert [waiter.work.request_id for waiter in world.flow.run_memory.waiters.values()] == ["old"], (
        "room is kept for it"
    )
    world.finish("runs")
    assert set(world.running) == {"old"}
    world.finish("old")
    assert set(world.running) == {"young"}
