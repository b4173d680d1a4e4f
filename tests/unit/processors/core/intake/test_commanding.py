"""New priorities in the flow: a request moves in its queue at each stage of its life, and says what it waits for."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import HIGH, LOW, MEDIUM, World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.work.states import Stage
from penstock.schemas.errors import EngineFailed
from penstock.schemas.records import ControlCommand

PRIORITIES = {HIGH: 1, MEDIUM: 5, LOW: 9}


def said(world: World, request_id: str) -> ask.Status:
    """The last status of a request."""
    return [one for one in world.effects(ask.Status) if one.subject.request_id == request_id][-1]


def reason(world: World, request_id: str) -> str:
    """What it said last that it waits for."""
    waiting = said(world, request_id).waiting
    return waiting.reason


def test_a_lifted_request_starts_before_what_stood_before_it() -> None:
    world = World()
    for request_id in ("first", "second", "third"):
        world.submit(request_id, MEDIUM)
    low = world.submit("low", LOW)
    world.reprioritize("low", PRIORITIES[HIGH])
    world.up()
    assert world.started == ["low"]
    assert (low.klass, low.priority) == (HIGH, 1)


def test_a_parked_request_is_read_again_for_its_new_class() -> None:
    world = World(intake_bytes=20_000)
    for n in range(40):
        world.submit(f"r{n}", LOW, size=1_000)
    lane = world.flow.lanes["m"]
    last = world.flow.registry.find("default", "r39")
    assert last.stage is Stage.PARKED
    parked = lane.parked[LOW]
    world.reprioritize("r39", PRIORITIES[HIGH])
    assert (lane.parked[LOW], lane.parked[HIGH]) == (parked - 1, 1)
    world.settle()
    world.up()
    assert world.started == ["r39"]
    world.finish("r39")
    while world.running:
        world.finish(next(iter(world.running)))
    assert world.flow.budget.bodies_bytes == 0
    assert len(world.ended) == 40


@pytest.mark.parametrize("stage", [Stage.QUEUED, Stage.PREPARING])
def test_a_request_gives_its_bytes_back_if_its_new_class_has_no_room(stage: Stage) -> None:
    world = World(intake_bytes=24_000)
    for number in range(2):
        world.submit(f"high{number}", HIGH, size=1_450)
    moved = world.submit("moved", LOW, size=1_450)
    if stage is Stage.PREPARING:
        world.hold_answers = {ask.Prepare}
        world.up(slots=4)
    assert moved.stage is stage
    world.reprioritize("moved", PRIORITIES[HIGH])
    high = [work.size_bytes for work in world.flow.works.values() if work.body is not None]
    assert sum(high) <= world.flow.budget.pair_share_bytes
    world.hold_answers = set()
    world.release(ask.Prepare)
    world.up(slots=4)
    while world.running:
        world.finish(next(iter(world.running)))
        world.pass_time(0.3)
    assert not world.flow.works
    assert world.flow.budget.used_bytes == 0


@pytest.mark.parametrize("runs", [True, False])
def test_one_that_runs_or_waits_for_a_retry_is_in_its_new_class_when_it_is_queued_again(runs: bool) -> None:
    world = ready(inline=True)
    moved = world.submit("moved", LOW)
    if runs:
        world.reprioritize("moved", PRIORITIES[HIGH])
    world.fail("moved", EngineFailed("the remote server said 500"))
    assert moved.stage is Stage.RETRYING
    world.submit("runs", MEDIUM)
    world.submit("waits", MEDIUM)
    if not runs:
        world.reprioritize("moved", PRIORITIES[HIGH])
    for _ in range(100):
        world.pass_time(0.1)
    world.finish("runs")
    assert list(world.running) == ["moved"]
    world.finish("moved")
    world.finish("waits")
    assert world.flow.budget.bodies_bytes == 0


def test_what_was_said_of_its_place_is_said_anew() -> None:
    world = ready(status_linger_s=0.0)
    for n in range(30):
        world.submit(f"r{n}", MEDIUM)
    world.submit("moved", HIGH)
    world.pass_time(0.1)
    assert said(world, "moved").position == 0
    world.reprioritize("moved", PRIORITIES[LOW])
    world.settle()
    status = said(world, "moved")
    assert status.position == status.waiting.position
    assert status.position is not None
    assert status.position >= 29


def test_a_request_whose_class_is_paused_says_so_when_it_is_moved_there() -> None:
    world = ready(status_linger_s=0.0)
    world.submit("runs", MEDIUM)
    world.submit("moved", MEDIUM)
    world.pass_time(0.1)
    assert reason(world, "moved") == "class"
    world.flow.orders.pause("class", LOW, True)
    world.reprioritize("moved", PRIORITIES[LOW])
    world.settle()
    assert reason(world, "moved") == "paused"
    world.finish("runs")
    assert not world.running
    world.reprioritize("moved", PRIORITIES[MEDIUM])
    world.settle()
    assert list(world.running) == ["moved"]


@pytest.mark.parametrize("again", [False, True])
def test_a_worker_that_reads_the_record_later_knows_the_new_class(again: bool) -> None:
    world = World()
    world.reprioritize("low", PRIORITIES[HIGH])
    world.submit("medium", MEDIUM)
    work = world.submit("low", LOW)
    assert work.klass == HIGH
    if again:
        world.reprioritize("low", PRIORITIES[HIGH])
    world.up()
    assert world.started == ["low"]


def send(world: World, kind: str, request_id: str = "r", **fields: Any) -> None:
    command = ControlCommand(
        kind=kind, request_id=request_id, tenant="default", **{"created_at": world.wall_ms, **fields}
    )
    world.flow.command(command, world.now, world.wall_ms)
    world.settle()


@pytest.mark.parametrize(
    ("reason", "said"), [("the operator stops it", "the operator stops it"), (None, "cancelled by its caller")]
)
def test_a_cancel_says_why(reason: str | None, said: str) -> None:
    world = World()
    work = world.submit("r")
    send(world, "cancel", reason=reason)
    assert (world.ended, str(work.outcome.error)) == ([("r", "cancelled")], said)


@pytest.mark.parametrize("kind", ["erase", "delete_conversation"])
@pytest.mark.parametrize(("later_ms", "ends"), [(0, True), (1, False)])
def test_what_came_after_an_erasure_or_a_deletion_is_not_of_it(kind: str, later_ms: int, ends: bool) -> None:
    """A replay of the control topic brings commands of before."""
    world = World()
    world.submit("r", conversation_id="c")
    send(world, kind, conversation_id="c", created_at=world.wall_ms - later_ms)
    assert bool(world.ended) is ends
    assert len(world.effects(ask.Erase)) == (kind == "erase") * (1 + ends)


@pytest.mark.parametrize("fields", [{"priority": None}, {"priority": 1, "kind": "of a later release"}])
def test_a_command_without_a_priority_or_of_an_unknown_kind_changes_nothing(fields: dict[str, Any]) -> None:
    world = World()
    work = world.submit("r")
    send(world, **{"kind": "reprioritize", **fields})
    assert (work.klass, work.priority) == (MEDIUM, 5)


def test_what_has_its_outcome_keeps_its_class() -> None:
    world = ready()
    world.hold_answers = {ask.Terminal}
    work = world.submit("r")
    world.finish("r")
    world.reprioritize("r", PRIORITIES[HIGH])
    assert (work.stage, work.klass) == (Stage.PUBLISHING, MEDIUM)


def test_a_new_owner_erases_again_what_is_remembered() -> None:
    world = World()
    send(world, "erase")
    world.seen.clear()
    world.assigned(2)
    assert [one.command.request_id for one in world.effects(ask.Erase)] == ["r"]
