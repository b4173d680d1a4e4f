"""Requests whose records are gone: the owner of the partition ends those that it does not hold, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import HIGH, MEDIUM, World
from penstock.processors.core.effects import CheckForAnswer, PublishDeadLetter, Terminal
from penstock.schemas.records import ControlCommand, Origin, Place

ORIGIN = Origin(topic=MEDIUM, partition=0, offset=7, append_time_ms=5)


def end_lost(world: World, request_id: str = "r1", **fields: Any) -> list[Any]:
    """The effects of the command."""
    values: dict[str, Any] = {"tenant": "default", "origin": ORIGIN, "task": "embedding", "created_at": world.wall_ms}
    command = ControlCommand(kind="end_lost", request_id=request_id, **{**values, **fields})
    world.flow.command(command, world.now, world.wall_ms)
    return world.flow.take_effects()


def test_what_nobody_holds_expires_with_its_first_origin() -> None:
    world = World()
    (effect,) = end_lost(world)
    assert isinstance(effect, Terminal)
    subject = effect.subject
    assert (effect.status, subject.origin, subject.epoch, subject.task) == ("expired", ORIGIN, 1, "embedding")
    assert "deleted or passed over" in str(effect.error)
    world.flow.durable.delivered(subject, "expired")
    assert not world.flow.works
    assert world.flow.gate.inflight == 0


def test_a_cancelled_one_ends_as_cancelled() -> None:
    world = World()
    world.cancel("r1")
    (effect,) = end_lost(world)
    assert effect.status == "cancelled"


@pytest.mark.parametrize("moved", [False, True])
def test_what_is_held_is_left_alone(moved: bool) -> None:
    """Waiting, or on its way to another partition: the record in the log is not needed any more."""
    world = World()
    work = world.submit("r1", belongs_on=3 if moved else None, settle=False)
    assert work is not None
    world.flow.take_effects()
    assert end_lost(world, origin=work.first_place) == []
    assert world.flow.works == {work.key: work}


def test_only_the_owner_of_the_partition_ends_it() -> None:
    world = World()
    assert end_lost(world, origin=Origin(topic=MEDIUM, partition=1, offset=7, append_time_ms=5)) == []
    assert end_lost(world, origin=None) == []


def test_of_a_moved_record_the_owner_of_its_last_place_decides() -> None:
    world = World()
    assert end_lost(world, place=Place(topic=MEDIUM, partition=3, offset=0)) == []
    elsewhere = Origin(topic=MEDIUM, partition=3, offset=9, append_time_ms=5)
    (effect,) = end_lost(world, origin=elsewhere, place=Place(topic=HIGH, partition=0, offset=4))
    assert (effect.subject.key, effect.subject.origin) == ((HIGH, 0, 4), elsewhere)


def test_a_second_command_on_the_way_to_the_broker_changes_nothing() -> None:
    world = World()
    assert len(end_lost(world)) == 1
    assert end_lost(world) == []


def test_a_worker_that_stops_leaves_it_to_the_next_owner() -> None:
    world = World()
    world.flow.stop_taking()
    world.flow.take_effects()
    assert end_lost(world) == []


def test_an_old_command_is_not_followed() -> None:
    """As at a replay of the control topic, a rebalance and a command that was under way for long."""
    world = World()
    world.flow.assigned({}, 2, fenced=False, now=world.now)
    assert end_lost(world) == []


def test_an_answer_in_the_conversation_is_its_outcome() -> None:
    world = World()
    (effect,) = end_lost(world, conversation_id="c")
    assert isinstance(effect, CheckForAnswer)
    assert (effect.subject.line, effect.subject.request.conversation_id) == ("c", "c")
    world.flow.durable.answer_checked(effect.subject, None, world.now)
    (outcome,) = world.flow.take_effects()
    assert isinstance(outcome, Terminal)
    assert outcome.status == "expired"


def test_the_record_comes_after_all() -> None:
    """A new leader's log may begin earlier: the record is taken, and readers follow whichever outcome is first."""
    world = World()
    world.offsets[(MEDIUM, 0)] = 7
    world.flow.arrivals.delivered_range((MEDIUM, 0), 0, 7, [])
    (effect,) = end_lost(world)
    work = world.submit("r1", settle=False)
    assert work is not None
    assert world.flow.works[work.key] is work
    world.flow.durable.delivered(effect.subject, "expired")
    assert world.flow.works[work.key] is work
    assert not [one for one in world.flow.take_effects() if isinstance(one, PublishDeadLetter)]
