"""Subjects: what effects carry of a request never changes, and an answer reaches only the request that it is for."""

from __future__ import annotations

from flow_driver import MEDIUM, World, ready
from penstock.processors.core import effects as ask


def test_an_effect_keeps_what_was_so_when_it_was_asked_for() -> None:
    world = ready(inline=True)
    work = world.submit("r", stream=True)
    before = work.subject
    assert work.subject is before, "it is made once while nothing changes"
    work.attempt += 1
    assert (before.attempt, work.subject.attempt) == (1, 2)
    assert work.subject is not before


def test_an_answer_for_a_request_that_was_let_go_of_does_not_end_the_next_one_at_its_place() -> None:
    world = ready(inline=True)
    world.hold_answers = {ask.Terminal}
    world.submit("r")
    world.finish("r")
    (old,) = world.asked
    committed = dict.fromkeys(world.flow.commit.partitions(), (0, ""))
    let_go = world.flow.assigned(committed, 7, fenced=True, now=world.now)
    assert let_go == {old.subject.seq}
    new = world.submit("r", offset=0)
    world.finish("r")
    assert new.stage.value == "publishing"
    assert world.flow.published(old.subject, "completed") is False
    assert new.stage.value == "publishing"
    assert world.committed(MEDIUM) == 0
    assert world.flow.published(new.subject, "completed")
    assert world.committed(MEDIUM) == 1


def test_a_parked_request_holds_no_bytes() -> None:
    world = World(intake_bytes=1000, status_linger_s=0.0)
    for number in range(8):
        world.submit(f"r{number}", size=400)
    world.pass_time(1.0)
    parked = [work for work in world.flow.works.values() if work.stage.value == "parked"]
    assert parked
    assert all(work.subject.body is None for work in parked)
    assert {one.subject.request_id for one in world.effects(ask.Status)} >= {work.request_id for work in parked}
