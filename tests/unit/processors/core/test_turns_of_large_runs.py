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
    world.configure()
    world.observe()
    world.submit("b1", model="b")
    for name in ("a1", "a2"):
        world.submit(name, model="a")
        world.finish(name)
    low = world.submit("low", "low", model="a", requirements=LARGE)
    world.pass_steps(2.0)
    medium = world.submit("medium", model="a", requirements=LARGE)
    world.pass_steps(0.5)
    assert medium is not None
    (head,) = world.flow.run_memory.heads.values()
    assert head.work is low, "it is the turn of what has waited long"
    assert (head.klass, head.oldest) == ("medium", medium.arrived_at)
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
    world.configure()
    world.observe()
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
    assert [head.work.lane for head in world.flow.run_memory.heads.values()] == ["a"]
    world.loaded("b", 0)
    world.pass_steps(1.0)
    assert set(world.running) == {"b0"}
