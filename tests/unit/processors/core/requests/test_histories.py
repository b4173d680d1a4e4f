"""The history of a request: empty for a clean first attempt, else what came of each attempt, to its outcome."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.flow import Flow
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import EngineFailed, InvalidRequest, Overloaded
from penstock.schemas.histories import MOST_ATTEMPTS, extended
from penstock.schemas.records import Attempt, AttemptHistory


def running(world: World) -> Work:
    since = world.now
    while "r" not in world.running:
        assert world.now - since < 60, "it does not run again"
        world.pass_time(0.1)
    return world.running["r"]


def history_of(world: World) -> AttemptHistory | None:
    """As its outcome has it."""
    (effect,) = world.effects(ask.Terminal)
    return effect.subject.history


def codes(history: AttemptHistory | None) -> list[tuple[int, str | None]]:
    return [(one.attempt, None if one.error is None else one.error.code) for one in history.attempts]


def test_a_clean_first_attempt_has_no_history() -> None:
    world = World(worker_id="w")
    world.up(inline=True)
    world.submit("r")
    world.finish("r")
    assert history_of(world) is None
    assert not world.effects(ask.AttemptEnded)


def test_statuses_and_the_outcome_name_every_attempt_with_its_times() -> None:
    world = World(worker_id="w")
    world.up(inline=True)
    world.submit("r")
    running(world)
    began = world.wall_ms
    world.pass_time(0.2)
    world.fail("r", EngineFailed("the server said 500"))
    ended = world.wall_ms
    (retrying,) = [e for e in world.effects(ask.Status) if e.status == "retrying"]
    assert codes(retrying.subject.history) == [(1, "engine_failed")]
    running(world)
    world.fail("r", Overloaded("full"))
    running(world)
    world.finish("r")
    history = history_of(world)
    assert codes(history) == [(1, "engine_failed"), (2, "overloaded"), (3, None)]
    first = history.attempts[0]
    assert (first.worker_id, first.started_at, first.ended_at) == ("w", began, ended)
    assert first.error.message == "the server said 500"


FAILED = EngineFailed("500")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([FAILED, FAILED], [(1, "engine_failed"), (2, "engine_failed")]),
        ([InvalidRequest("no")], [(1, "invalid")]),
        ([FAILED, "cancel"], [(1, "engine_failed"), (2, "cancelled")]),
    ],
    ids=["dead letter", "final failure", "cancelled"],
)
def test_each_attempt_is_named_once(ends: list[Any], expected: list[tuple[int, str]]) -> None:
    world = ready(inline=True)
    world.submit("r", max_attempts=2)
    for end in ends:
        running(world)
        world.cancel("r") if end == "cancel" else world.fail("r", end, again=end is FAILED)
    assert codes(history_of(world)) == expected
    letters = world.effects(ask.PublishDeadLetter)
    assert [codes(one.subject.history) for one in letters] == ([expected] if ends == [FAILED] * 2 else [])


def test_who_ran_beside_a_poisonous_request_is_told_so() -> None:
    world = ready(slots=2, inline=True)
    world.submit("r")
    world.submit("other")
    world.die()
    work = world.flow.registry.find("default", "r")
    assert codes(work.history) == [(1, "engine_failed")]


def test_a_request_that_is_retried_for_long_stays_small() -> None:
    world = ready(inline=True)
    world.submit("r")
    for _ in range(40):
        running(world)
        world.fail("r", FAILED)
    running(world)
    world.finish("r")
    history = history_of(world)
    assert (len(history.attempts), history.dropped) == (MOST_ATTEMPTS, 41 - MOST_ATTEMPTS)


class Journaled(World):
    """What an earlier life left in the journal."""

    def make_flow(self, *args: Any) -> Flow:
        died = extended(None, [Attempt(attempt=1, worker_id="before")])
        return Flow(*args, deaths=lambda *_: 1, earlier_attempts=lambda key, _: died if key[2] == 0 else None)


def test_attempts_under_which_workers_died_stand_before_those_of_this_life() -> None:
    world = Journaled(worker_id="now")
    world.up(inline=True)
    world.submit("r")
    running(world)
    world.finish("r")
    history = history_of(world)
    assert [(one.worker_id, one.attempt) for one in history.attempts] == [("before", 1), ("now", 1)]
    assert world.effects(ask.ForgetDeaths)
