"""A step comes to an end: no two decisions of the flow undo each other at one instant."""

from __future__ import annotations

import pytest

from card_driver import GB, Card, gb, spec
from penstock.processors.core import effects as ask
from penstock.processors.core.flow import EndlessStep
from penstock.schemas.errors import EngineFailed
from penstock.schemas.records import Requirements


def test_a_step_that_goes_round_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose event loop is gone would never be restarted."""
    world = Card(80, {"a": gb(10)}, seen=False)
    monkeypatch.setattr(world.flow.placing, "plan", lambda now: None)
    with pytest.raises(EndlessStep):
        world.configure()


def test_a_run_that_waits_for_memory_and_a_suspect_do_not_take_replicas_from_each_other_for_ever() -> None:
    """A suspect has a replica for itself. A run beside it wants memory, and one replica less would give it."""
    world = Card(100, {"a": gb(20), "b": gb(20)}, slots=2, specs=[spec("a", min_replicas=2, max_replicas=2)])
    hungry = Requirements(vram_bytes=90 * GB)
    world.hold_answers.add(ask.Prepare)
    world.submit("b1", "low", model="b")
    world.submit("a1", "high", model="a", requirements=hungry)
    world.submit("a2", "high", model="a", requirements=hungry, conversation="x")
    world.submit("a3", "high", model="a", requirements=hungry)
    world.submit("a4", "low", model="a", requirements=hungry, conversation="y")
    world.finish("b1")
    world.submit("b2", model="b", requirements=hungry, conversation="y")
    world.die("a")
    if world.running:
        world.finish(sorted(world.running)[0])
    world.release(ask.Prepare)
    for _ in range(20):
        for name in sorted(world.running):
            world.finish(name)
        world.pass_steps(5.0)
    assert set(dict(world.ended).values()) == {"completed"}
    assert len(world.ended) == 6


def test_a_failed_load_of_a_second_replica_does_not_hide_the_first_from_placement() -> None:
    """Its size is read again before the next load. Until then the memory that it holds can still be taken back."""
    world = Card(100, {"a": gb(40), "b": gb(70)}, by_hand=True, specs=[spec("a", min_replicas=2, max_replicas=2)])
    world.submit("r1", model="a")
    assert world.slow_loads == [("a", 0)]
    world.loaded("a", 0)
    world.settle()
    world.pass_steps(0.5)
    assert world.slow_loads == [("a", 0), ("a", 1)]
    world.load_failed(EngineFailed("it did not start"), "a", replica=1)
    for loaded in (False, None):  # nobody wants it any more; the order is taken back before it was followed
        world.flow.orders.desire("a", loaded, None)
    world.finish("r1")
    world.submit("r2", model="b")
    world.pass_steps(30.0)
    assert world.slow_loads[-1] == ("b", 0), world.flow.lane("a").replicas


@pytest.mark.parametrize("order", [{"pinned": True}, {"loaded": True}])
def test_room_for_a_paused_model_that_is_to_be_loaded_is_not_given_back_for_ever(order: dict[str, bool]) -> None:
    """Found by the simulator: a second replica was drained for a paused model, and the drain was undone, for ever."""
    world = Card(100, {"a": gb(40), "b": gb(50)}, specs=[spec("a", min_replicas=2, max_replicas=2)])
    world.submit("r1", model="a")
    world.submit("r2", model="a")
    world.pass_steps(30.0)
    assert world.ready("a") == [0, 1]
    world.configure(a=spec("a", max_replicas=2))
    world.flow.orders.pause("model", "b", True)
    world.flow.orders.desire("b", order.get("loaded"), order.get("pinned"))
    world.pass_steps(30.0)
    drained = world.flow.lane("a").replicas[1].state
    for name in sorted(world.running):
        world.finish(name)
    world.pass_steps(30.0)
    assert (drained, world.ready("b")) == ("draining", [0])
