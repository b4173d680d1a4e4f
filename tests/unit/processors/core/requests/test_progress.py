"""Steps of runs as statuses: in order, a few a second, never of a run that is over."""

from __future__ import annotations

import pytest

from flow_driver import World
from penstock.processors.core import effects as ask
from penstock.processors.core.requests.progress import EVERY_S
from penstock.schemas.errors import EngineFailed


class Steps(World):
    """Keeps the statuses and previews that are emitted."""

    def __init__(self) -> None:
        super().__init__("m")
        self.statuses: list[ask.Status] = []
        self.previews: list[ask.ShowPreview] = []
        self.up(slots=4)

    def answer(self, effect: object) -> None:
        if isinstance(effect, ask.Status):
            self.statuses.append(effect)
        elif isinstance(effect, ask.ShowPreview):
            self.previews.append(effect)
        super().answer(effect)

    def step(self, step: int, request_id: str = "r", steps: int = 10) -> None:
        work = self.running[request_id]
        assert work.run is not None
        self.flow.output.stepped(work.subject, work.run.run_id, step, steps, self.now)
        self.settle()

    def told(self) -> list[int]:
        return [one.step for one in self.statuses if one.step is not None]


@pytest.fixture
def world() -> Steps:
    world = Steps()
    world.submit("r")
    world.settle()
    return world


def test_the_first_step_is_told_at_once_and_the_newest_of_later_ones_in_time(world: Steps) -> None:
    for step in range(1, 6):
        world.step(step)
    assert world.told() == [1]
    (first,) = [one for one in world.statuses if one.step == 1]
    assert (first.status, first.steps, first.subject.attempt) == ("running", 10, 1)
    world.pass_time(EVERY_S)
    assert world.told() == [1, 5], "what lies between is passed over"
    world.pass_time(EVERY_S)
    world.step(6)
    assert world.told() == [1, 5, 6]


def test_steps_never_go_back_and_a_repeat_is_no_news(world: Steps) -> None:
    world.step(3)
    world.pass_time(1)
    world.step(3)
    world.step(2)
    world.pass_time(1)
    assert world.told() == [3]


def test_nothing_is_told_of_a_run_that_is_over(world: Steps) -> None:
    work = world.running["r"]
    assert work.run is not None
    run_id = work.run.run_id
    world.step(1)
    world.step(2)
    world.finish("r")
    world.flow.output.stepped(work.subject, run_id, 9, 10, world.now)
    world.flow.output.previewed(work.subject, run_id, "image")
    world.pass_time(1)
    assert world.told() == [1]
    assert world.previews == []


def test_steps_of_the_next_attempt_begin_anew_under_a_number_of_its_own(world: Steps) -> None:
    world.step(7)
    world.fail("r", EngineFailed("it broke"))
    world.pass_time(30)
    world.step(1)
    steps = [(one.subject.attempt, one.step) for one in world.statuses if one.step is not None]
    assert steps == [(1, 7), (2, 1)]


def test_a_preview_is_passed_on_with_its_attempt(world: Steps) -> None:
    work = world.running["r"]
    assert work.run is not None
    world.flow.output.previewed(work.subject, work.run.run_id, "image")
    world.settle()
    (preview,) = world.previews
    assert (preview.preview, preview.subject.attempt, preview.run_id) == ("image", 1, work.run.run_id)
