"""Requests whose records are gone: the owner of the partition ends those that it does not hold, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import HIGH, MEDIUM, World
from penstock.processors.core.effects import CheckForAnswer, PublishDeadLetter, Terminal
from penstock.schemas.records import ControlCommand, Origin, Place
from penstock.schemas.topics import conversation_key

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
    world.flow.published(subject, "expired")
    assert not world.flow.works
    assert world.flow.commit.inflight == 0


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
    world.flow.take_effects()
    assert end_lost(world, origin=work.first_place) == []
    assert world.flow.works == {work.key: work}


ELSEWHERE: dict[str, dict[str, Any]] = {
    "another partition": {"origin": Origin(topic=MEDIUM, partition=1, offset=7, append_time_ms=5)},
    "no origin": {"origin": None},
    "its last place is another partition": {"place": Place(topic=MEDIUM, partition=3, offset=0)},
}


@pytest.mark.parametrize("why", [*ELSEWHERE, "asked before", "the worker stops", "the partition has gone"])
def test_it_is_left_to_others(why: str) -> None:
    """Commands come again: at a replay of the control topic, after a rebalance, and when they were under way long."""
    world = World()
    match why:
        case "asked before":
            assert len(end_lost(world)) == 1
        case "the worker stops":
            world.flow.stop_taking()
            world.flow.take_effects()
        case "the partition has gone":
            world.assigned(2, ())
        case _:
            pass
    assert end_lost(world, **ELSEWHERE.get(why, {})) == []


def test_of_a_moved_record_the_owner_of_its_last_place_decides() -> None:
    world = World()
    elsewhere = Origin(topic=MEDIUM, partition=3, offset=9, append_time_ms=5)
    (effect,) = end_lost(world, origin=elsewhere, place=Place(topic=HIGH, partition=0, offset=4))
    assert (effect.subject.key, effect.subject.origin) == ((HIGH, 0, 4), elsewhere)


def test_an_answer_in_the_conversation_is_its_outcome() -> None:
    world = World()
    (effect,) = end_lost(world, conversation_id="c")
    assert isinstance(effect, CheckForAnswer)
    assert (effect.subject.conversation, effect.subject.request.conversation_id) == ("c", "c")
    world.flow.durable.answer_checked(effect.subject, None, world.now)
    (outcome,) = world.flow.take_effects()
    assert isinstance(outcome, Terminal)
    assert outcome.status == "expired"


def test_the_record_comes_after_all() -> None:
    """A new leader's log may begin earlier: the record is taken, and readers follow whichever outcome is first."""
    world = World()
    world.offsets[(MEDIUM, 0)] = 7
    world.flow.commit.delivered((MEDIUM, 0), 0, 7, [])
    (effect,) = end_lost(world)
    work = world.submit("r1", settle=False)
    assert world.flow.works[work.key] is work
    world.flow.published(effect.subject, "expired")
    assert world.flow.works[work.key] is work
    assert not [one for one in world.flow.take_effects() if isinstance(one, PublishDeadLetter)]


@pytest.mark.parametrize(("task", "takes_turn"), [("text_generation", True), ("summarization", False)])
def test_it_is_its_tenants_and_of_its_conversation(task: str, takes_turn: bool) -> None:
    world = World()
    (effect,) = end_lost(world, tenant="acme", task=task, conversation_id="c")
    subject = effect.subject
    assert (subject.tenant, subject.request.tenant, subject.attempt) == ("acme", "acme", 1)
    assert subject.conversation == (conversation_key("acme", "c") if takes_turn else None)
    assert subject.conversation_id == "c"


def test_a_second_record_of_what_ends_is_left_to_it() -> None:
    world = World()
    (effect,) = end_lost(world, conversation_id="c")
    assert (
        end_lost(world, conversation_id="c", origin=Origin(topic=MEDIUM, partition=0, offset=9, append_time_ms=6)) == []
    )
    world.flow.durable.answer_checked(effect.subject, None, world.now)
    (outcome,) = world.flow.take_effects()
    assert isinstance(outcome, Terminal)
    assert outcome.status == "expired"


def test_the_reason_of_a_cancel_is_said_also_of_what_is_lost() -> None:
    world = World()
    cancel = ControlCommand(
        kind="cancel", request_id="r1", tenant="default", created_at=world.wall_ms, reason="too late"
    )
    world.flow.command(cancel, world.now, world.wall_ms)
    (effect,) = end_lost(world)
    assert str(effect.error) == "too late"
