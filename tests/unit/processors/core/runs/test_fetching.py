"""Bytes of parked requests are read again before their turn: in order, within their share, a large one at its turn."""

from __future__ import annotations

from flow_driver import MEDIUM, World
from penstock.processors.core import effects as ask
from penstock.processors.core.work.states import IN_SCHEDULER, Stage

SIZE = 20_000


def kept_bytes(world: World) -> int:
    """Of requests that wait."""
    works = world.flow.works.values()
    return sum(work.size_bytes for work in works if work.body is not None and work.stage in IN_SCHEDULER)


def test_they_are_read_before_the_last_that_has_its_bytes_runs() -> None:
    world = World(intake_bytes=1 << 20)
    share_bytes = world.flow.budget.pair_share_bytes
    names = [f"r{number}" for number in range(40)]
    for name in names:
        world.submit(name, size=SIZE, settle=False)
    kept = sum(work.body is not None for work in world.flow.works.values())
    assert kept == share_bytes // SIZE
    world.hold_answers = {ask.Fetch}
    world.up()
    while any(work.stage is Stage.PARKED for work in world.flow.works.values()):
        while not world.held(ask.Fetch):
            assert kept_bytes(world), "before they are needed"
            world.finish(*world.running)
        (fetch,) = world.asked
        assert kept_bytes(world) + len(fetch.offsets) * SIZE <= share_bytes
        world.release(ask.Fetch)
        world.hold_answers = {ask.Fetch}
    while world.running:
        world.finish(*world.running)
    assert world.started == names
    read = [offset for fetch in world.effects(ask.Fetch) for offset in fetch.offsets]
    assert read == list(range(kept, len(names))), "in their order, each once"


def test_one_that_is_larger_than_its_share_is_read_at_its_turn_and_those_behind_it_after_it() -> None:
    world = World(intake_bytes=1 << 20)
    share_bytes = world.flow.budget.pair_share_bytes
    before = [world.submit(f"before{number}", size=share_bytes // 6, settle=False) for number in range(6)]
    large = world.submit("large", size=share_bytes + 1, settle=False)
    behind = world.submit("behind", size=100, settle=False)
    world.up()
    for work in before:
        assert (work.stage, large.stage, behind.stage) == (Stage.RUNNING, Stage.PARKED, Stage.PARKED)
        world.finish(work.request_id)
    assert (large.stage, behind.stage) == (Stage.RUNNING, Stage.PARKED)
    world.finish("large")
    world.finish("behind")
    assert [status for _, status in world.ended] == ["completed"] * 8


def test_each_tick_fills_what_their_share_has_room_for() -> None:
    world = World(intake_bytes=1 << 20)
    for number in range(20):
        world.submit(f"r{number}", size=SIZE, settle=False)
    world.up()
    while any(work.stage is Stage.PARKED for work in world.flow.works.values()):
        world.finish(*world.running)
        world.pass_time(0.01)
        assert world.flow.budget.room(MEDIUM, "m") < SIZE or world.flow.lane("m").parked[MEDIUM] == 0
