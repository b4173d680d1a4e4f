"""Steps of runs as statuses: in order, a few a second, never of a run that is over."""

from __future__ import annotations

import pytest

from flow_driver import World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.runs.progress import EVERY_S
from penstock.schemas.errors import EngineFailed


@pytest.fixture
def world() -> World:
    world = ready(slots=4)
    world.submit("r")
    return world


def step(world: World, step: int) -> None:
    work = world.running["r"]
    world.flow.output.stepped(work.subject, work.run.run_id, step, 10, world.now)
    world.settle()


def told(world: World) -> list[tuple[int, int]]:
    """(attempt, step) of each status that names a step."""
    return [(one.subject.attempt, one.step) for one in world.effects(ask.Status) if one.step is not None]


def test_the_first_step_is_told_at_once_and_the_newest_of_later_ones_in_time(world: World) -> None:
    for number in range(1, 6):
        step(world, number)
    assert told(world) == [(1, 1)]
    (first,) = [one for one in world.effects(ask.Status) if one.step == 1]
    assert (first.status, first.steps) == ("running", 10)
    world.pass_time(EVERY_S)
    assert told(world) == [(1, 1), (1, 5)], "what lies between is passed over"
    world.pass_time(EVERY_S)
    step(world, 6)
    step(world, 6)
    step(world, 3)
    world.pass_time(1)
    assert told(world) == [(1, 1), (1, 5), (1, 6)], "a repeat is no news, and steps never go back"


def test_nothing_is_told_of_a_run_that_is_over(world: World) -> None:
    work = world.running["r"]
    run_id = work.run.run_id
    for number in (1, 2):
        step(world, number)
    world.finish("r")
    world.flow.output.stepped(work.subject, run_id, 9, 10, world.now)
    world.flow.output.previewed(work.subject, run_id, "image")
    world.pass_time(1)
    assert (told(world), world.effects(ask.ShowPreview)) == ([(1, 1)], [])


def test_steps_of_the_next_attempt_begin_anew_under_a_number_of_its_own(world: World) -> None:
    step(world, 7)
    world.fail("r", EngineFailed("it broke"))
    world.pass_time(30)
    step(world, 1)
    assert told(world) == [(1, 7), (2, 1)]


def test_a_preview_is_passed_on_with_its_attempt(world: World) -> None:
    work = world.running["r"]
    world.flow.output.previewed(work.subject, work.run.run_id, "image")
    world.settle()
    (preview,) = world.effects(ask.ShowPreview)
    assert (preview.preview, preview.subject.attempt, preview.run_id) == ("image", 1, work.run.run_id)
