"""Failed attempts in the flow: they run again until the deadline, unless somebody sets a bound."""

from __future__ import annotations

import pytest

from flow_driver import World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.residents import ModelSpec
from penstock.processors.core.work.retries import RetrySettings
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import EngineFailed, ExecutionTimeout, Overloaded, PenstockError


def running(world: World, request_id: str = "r") -> Work:
    """The request's next run."""
    since = world.now
    while request_id not in world.running:
        assert world.now - since < 60, "it does not run again"
        world.pass_time(0.1)
    return world.running[request_id]


def error_of(world: World, request_id: str = "r") -> PenstockError:
    (error,) = [e.error for e in world.effects(ask.Terminal) if e.subject.request_id == request_id]
    assert error is not None
    return error


def test_a_run_that_takes_too_long_runs_again() -> None:
    world = ready(inline=True)
    world.submit("r", execution_timeout_ms=500, stream=True)
    work = running(world)
    world.delta("r", "some")
    world.pass_time(0.6)
    assert (work.stage, work.spent, work.attempt) == (Stage.RETRYING, 2, 2)
    assert [chunk.text for chunk in world.chunks] == ["some"]
    assert world.effects(ask.CancelRun)
    assert running(world) is work
    world.finish("r")
    assert world.ended == [("r", "completed")]


def test_the_callers_bound_is_of_attempts_that_ran() -> None:
    world = ready(inline=True)
    world.submit("r", max_attempts=2, execution_timeout_ms=500)
    for _ in range(20):
        running(world)
        world.fail("r", Overloaded("the server is full"))
    for _ in range(2):
        running(world)
        world.pass_time(0.6)
    assert (world.ended, world.letters) == ([("r", "dead_lettered")], ["r"])
    assert isinstance(error_of(world), ExecutionTimeout)


@pytest.mark.parametrize(("of_model", "of_caller", "attempts"), [(2, 0, 2), (2, 4, 4), (None, 1, 1)])
def test_a_models_bound_holds_where_the_caller_sets_none(of_model: int | None, of_caller: int, attempts: int) -> None:
    world = World()
    world.flow.orders.configure({"m": ModelSpec(model="m", max_attempts=of_model)}, world.now)
    world.up(inline=True)
    world.submit("r", max_attempts=of_caller)
    while not world.ended:
        running(world)
        world.fail("r", EngineFailed("no"))
    assert len(world.started) == attempts
    assert world.letters == ["r"]


def test_a_model_may_have_a_backoff_of_its_own() -> None:
    world = World("m", "slow")
    fixed = RetrySettings(backoff="fixed", first_s=8.0)
    specs = {"m": ModelSpec(model="m"), "slow": ModelSpec(model="slow", retries=fixed)}
    world.flow.orders.configure(specs, world.now)
    for model in specs:
        world.up(model, inline=True)
        world.submit(model, model=model)
        world.fail(model, EngineFailed("no"))
    world.pass_time(0.2)
    assert world.running.keys() == {"m"}
    world.pass_time(3.0)
    assert world.running.keys() == {"m"}
    world.pass_time(5.0)
    assert world.running.keys() == {"m", "slow"}


def test_a_retry_that_could_only_start_after_the_deadline_is_not_scheduled() -> None:
    world = ready(inline=True)
    world.submit("r", ttl_ms=2_000)
    world.pass_time(1.95)
    world.fail("r", EngineFailed("no"))
    assert (world.ended, world.letters) == ([("r", "dead_lettered")], ["r"])
    assert error_of(world).message == "no"


@pytest.mark.parametrize("max_attempts", [0, 10])
def test_an_engine_may_die_twice_under_a_request_and_not_three_times(max_attempts: int) -> None:
    world = ready(inline=True)
    world.submit("r", max_attempts=max_attempts)
    for _ in range(2):
        running(world)
        world.die()
        world.up(inline=True)
    assert running(world).spent == 3
    assert not world.ended
    world.die()
    assert (world.ended, world.letters) == ([("r", "dead_lettered")], ["r"])


def test_the_turns_behind_one_that_is_retried_wait_for_their_conversation() -> None:
    world = ready(slots=4)
    world.submit("first", conversation="c")
    world.fail("first", EngineFailed("no"))
    second = world.submit("second", conversation="c")
    other = world.submit("other", conversation="d")
    assert other.stage is Stage.RUNNING
    assert world.flow.waiting_for(second, world.now).reason == "conversation"
    running(world, "first")
    assert world.flow.waiting_for(second, world.now).reason == "conversation"
    world.finish("first")
    assert second.stage is Stage.RUNNING


def flood(world: World, count: int, size: int) -> None:
    """As many requests, each with a conversation of its own, and all of them fail at their first attempt."""
    world.up(slots=8)
    for number in range(count):
        world.submit(f"r{number}", conversation=f"c{number}", size=size, settle=False)
    world.settle()
    for _ in range(count):
        if not world.running:
            break
        world.fail(next(iter(world.running)), Overloaded("full", retry_after_s=30))


def test_the_bytes_of_those_that_wait_for_a_retry_keep_to_their_share() -> None:
    """Retries go on for an hour: what fails would fill the memory that is meant for what waits."""
    world = World(intake_bytes=1 << 20)
    flood(world, 60, size=10_000)
    share = world.flow.budget.pair_share_bytes
    assert not world.running, "each has failed"
    assert 0 < world.flow.budget.bodies_bytes <= share + 10_000
    world.pass_time(40)
    for _ in range(60):
        world.finish(next(iter(world.running)))
    assert len(world.ended) == 60
    assert {status for _, status in world.ended} == {"completed"}
    assert world.flow.budget.bodies_bytes == 0
    assert world.committed() == 60


@pytest.mark.parametrize("way", ["cancel", "expire", "gone", "dropped", "cancelled as it is read"])
def test_what_waits_for_a_retry_without_its_bytes_ends_as_any_other(way: str) -> None:
    world = World(intake_bytes=1 << 20)
    flood(world, 60, size=10_000)
    parked = [work for work in world.flow.works.values() if work.stage is Stage.RETRYING and work.body is None]
    assert len(parked) > 30
    (work, *_) = parked
    world.submit("behind", conversation=work.conversation)
    status = "cancelled"
    match way:
        case "cancel":
            world.cancel(work.request_id)
        case "expire":
            work.deadline = world.now + 1.0
            world.flow.attempts._retries.add(work, work.deadline)
            world.pass_time(1.0)
            status = "expired"
        case "gone":
            world.hold_answers = {ask.Fetch}
            world.cancel(work.request_id)
            world.flow.arrivals.gone(work.key, world.now)
        case "dropped":
            world.flow.assigned({}, 2, fenced=False, now=world.now)
            assert not world.flow.works
            return
        case _:
            world.hold_answers = {ask.Fetch}
            world.cancel(work.request_id)
            world.cancel(work.request_id)
            world.release(ask.Fetch)
    world.settle()
    assert world.status_of(work.request_id) == status
    assert world.running.keys() == {"behind"}, "its conversation goes on"


def test_what_a_full_server_turned_away_until_its_deadline_says_why_it_expires() -> None:
    world = ready(inline=True)
    work = world.submit("r", ttl_ms=2_000)
    world.flow.replicas.busy("m", 0, 60.0, world.now)
    world.running.clear()
    world.flow.attempts.turned_away(work.subject, work.run.run_id, Overloaded("the remote server said 429"), world.now)
    world.settle()
    assert (work.stage, work.spent) == (Stage.QUEUED, 1)
    world.pass_time(2.0)
    assert world.ended == [("r", "expired")]
    assert "the remote server said 429" in error_of(world).message


def test_the_flow_is_due_when_the_first_retry_is() -> None:
    world = ready(slots=2, inline=True)
    works = [world.submit("r"), world.submit("other")]
    world.pass_time(2.0)  # that they run has been said
    world.fail("r", EngineFailed("once"))
    first_at = world.flow.next_due()
    assert first_at is not None
    assert first_at > world.now
    world.pass_time((first_at - world.now) / 2)
    world.fail("other", EngineFailed("later"))
    assert world.flow.next_due() == first_at
    world.pass_time(first_at - world.now - 0.001)
    assert [work.stage for work in works] == [Stage.RETRYING, Stage.RETRYING]
    world.pass_time(0.002)
    assert [work.stage for work in works] == [Stage.RUNNING, Stage.RETRYING]
