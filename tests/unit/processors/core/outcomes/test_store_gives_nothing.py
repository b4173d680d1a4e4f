"""A store of artifacts that does not give what a run needs: it is asked until the deadline, and no attempt is spent."""

from __future__ import annotations

from flow_driver import MEDIUM, World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.work.retries import RetrySettings
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import EngineFailed, PenstockError, StoreUnavailable

AWAY = StoreUnavailable("the store of artifacts at s3://b failed: 403 Forbidden")


def asked(request_id: str = "r", **fields: int | str) -> tuple[World, Work]:
    """A request whose image is asked of the store."""
    world = ready(slots=8, retries=RetrySettings(first_s=0.5))
    world.hold_answers = {ask.Prepare}
    work = world.submit(request_id, **fields)  # pyright: ignore[reportArgumentType]
    assert work.stage is Stage.PREPARING
    return world, work


def refuse(world: World, work: Work, error: PenstockError = AWAY) -> None:
    world.asked.clear()
    world.refuse(work, error)


def next_ask_s(world: World) -> float:
    """Seconds until the store is asked again."""
    since = world.now
    while not world.asked:
        assert world.now - since < 60, "it is not asked again"
        world.pass_time(0.1)
    return round(world.now - since, 1)


def test_it_is_asked_again_with_growing_delays_and_no_attempt_is_spent() -> None:
    world, work = asked(max_attempts=1)
    delays: list[float] = []
    for _ in range(6):
        refuse(world, work)
        assert work.stage is Stage.RETRYING
        delays.append(next_ask_s(world))
    for delay, whole in zip(delays, [0.5, 1, 2, 4, 8, 10], strict=True):
        assert whole / 2 <= delay <= whole + 0.15
    world.release(ask.Prepare)
    assert work.spent == 1
    world.finish("r")
    assert world.ended == [("r", "completed")]
    assert world.committed(MEDIUM) == 1


def test_other_failures_in_between_spend_attempts_as_ever() -> None:
    world, work = asked(max_attempts=2)
    refuse(world, work)
    next_ask_s(world)
    refuse(world, work, EngineFailed("no"))
    assert (work.spent, work.put_backs) == (2, 0)
    next_ask_s(world)
    refuse(world, work)
    assert next_ask_s(world) <= 0.65, "another outage"
    refuse(world, work, EngineFailed("no"))
    assert world.ended == [("r", "dead_lettered")]


def test_its_deadline_ends_it_and_names_the_cause() -> None:
    world, work = asked(ttl_ms=5_000)
    while not world.ended:
        if work.stage is Stage.PREPARING:
            refuse(world, work)
        world.pass_time(0.1)
    assert world.ended == [("r", "expired")]
    (terminal,) = world.effects(ask.Terminal)
    assert AWAY.message in terminal.error.message
    assert world.now >= 105


def test_a_cancel_ends_it_at_once() -> None:
    world, work = asked()
    refuse(world, work)
    world.cancel("r")
    assert world.ended == [("r", "cancelled")]


def test_the_next_turn_waits_for_it_and_others_do_not() -> None:
    world, work = asked(conversation="c")
    refuse(world, work)
    world.release(ask.Prepare)
    world.submit("next", conversation="c")
    world.submit("other")
    assert world.started == ["other"]
    world.pass_time(0.6)
    assert world.started == ["other", "r"]
    world.finish("r")
    assert world.started == ["other", "r", "next"]
