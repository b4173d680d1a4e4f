"""What became durable of a request that ends: its outcome says it."""

from __future__ import annotations

import pytest

from flow_driver import MEDIUM, World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import EngineFailed, InvalidRequest, WrongMagic


def storing(*, stream: bool = True) -> tuple[World, Work, ask.StoreOutput]:
    """A request that has run, whose large output is on its way to the store."""
    world = ready()
    world.hold_answers = {ask.StoreOutput}
    work = world.submit("r", stream=stream)
    world.finish("r", large=True, output_bytes=1 << 20)
    (asked,) = world.asked
    return world, work, asked


@pytest.mark.parametrize(("left", "held"), [(None, 1 << 20), (7, 7)])
def test_an_outcome_is_of_what_the_store_holds(left: int | None, held: int) -> None:
    world, work, asked = storing()
    world.flow.durable.stored(asked.subject, "as stored", "an artifact", world.now, output_bytes=left)
    assert (work.outcome.status, work.outcome.finished, work.outcome.artifact) == (
        "completed",
        "as stored",
        "an artifact",
    )
    assert work.output_bytes == held
    assert work.outcome.subject.attempt == 1


@pytest.mark.parametrize("stream", [True, False])
def test_readers_of_a_stream_tell_an_earlier_answer_from_what_this_run_said(*, stream: bool) -> None:
    world, work, asked = storing(stream=stream)
    world.flow.durable.stored(asked.subject, "another run's", None, world.now, another=True)
    assert work.outcome.subject.attempt == (2 if stream else 1)


def test_a_stream_of_which_a_piece_cannot_be_published_fails_and_stops_its_run() -> None:
    world = ready()
    work = world.submit("r", stream=True)
    world.submit("next")
    world.flow.durable.chunk_refused(work.subject, world.now)
    world.settle()
    assert world.ended == [("r", "failed")]
    assert work.outcome.error.code == "internal"
    assert world.effects(ask.CancelRun)
    assert list(world.running) == ["next"]
    world.finish("next")
    world.flow.durable.chunk_refused(work.subject, world.now)  # it is over
    assert world.committed(MEDIUM) == 2


def test_followers_of_statuses_hear_that_a_request_is_done() -> None:
    world = ready()
    world.submit("r")
    assert not any(one.done for one in world.effects(ask.Status))
    world.finish("r")
    done = [one for one in world.effects(ask.Status) if one.done]
    assert [(one.subject.request_id, one.status) for one in done] == [("r", "completed")]


@pytest.mark.parametrize(
    ("died", "ran", "forgotten"), [(0, True, False), (1, True, True), (1, False, False), (0, False, False)]
)
def test_deaths_are_forgotten_of_what_has_run_since(*, died: int, ran: bool, forgotten: bool) -> None:
    """What ended unrun keeps them: it may be delivered again before its offset is committed."""
    world = World() if not ran else ready()
    world.died_of = {"r": died}
    world.submit("r")
    if ran:
        world.finish("r")
    else:
        world.cancel("r")
    assert len(world.ended) == 1
    assert bool(world.effects(ask.ForgetDeaths)) is forgotten


def test_a_record_without_a_name_is_committed_after_its_letter() -> None:
    world = ready()
    world.poison(WrongMagic("no magic byte"))
    assert (world.letters, world.ended, world.committed(MEDIUM)) == ([""], [], 1)
    assert not world.flow.works


def test_an_outcome_says_where_and_how_long_it_ran() -> None:
    world = World()
    world.up(replica=3)
    world.hold_answers = {ask.Prepare}
    work = world.submit("r")
    world.pass_time(0.25)
    world.flow.attempts.prepared(work.subject, work.run.run_id, 0, "as prepared", world.now)
    world.settle()
    world.pass_time(2.0)
    world.finish("r")
    outcome = work.outcome
    assert (outcome.replica, outcome.prepared, outcome.error, outcome.since) == (3, "as prepared", None, None)
    assert (outcome.ran_s, outcome.prepared_s) == pytest.approx((2.0, 0.25))
    assert (outcome.timings.run_ms, outcome.klass) == (2_000, MEDIUM)


def test_an_outcome_of_what_never_ran_names_no_run() -> None:
    world = World()
    work = world.submit("r")
    world.cancel("r")
    outcome = work.outcome
    assert (outcome.ran_s, outcome.replica, outcome.prepared, outcome.prepared_s) == (None, None, None, None)
    assert outcome.error.code == "cancelled"


@pytest.mark.parametrize("completed", [True, False])
def test_an_outcome_says_in_which_attempt_its_text_began(*, completed: bool) -> None:
    world = ready()
    work = world.submit("r", stream=True)
    work.run.since = (1, 1)
    world.finish("r") if completed else world.fail("r", InvalidRequest("no"), again=False)
    assert work.outcome.since == ((1, 1) if completed else None)


def test_timings_are_of_the_first_start_and_of_the_last_run() -> None:
    world = World()
    work = world.submit("r", stream=True)
    world.pass_time(3.0)
    world.up()
    world.pass_time(1.0)
    world.fail("r", EngineFailed("it fell over"))
    world.pass_time(30.0)
    assert work.stage is Stage.RUNNING
    began = work.run.run_at
    assert began is not None
    world.pass_time(0.5)
    world.delta("r", "a")
    world.pass_time(1.5)
    world.finish("r")
    timings = work.outcome.timings
    assert timings.queued_ms + timings.load_ms == 3_000
    assert timings.admission_ms == round(1_000 * (began - 103.0))
    assert timings.run_ms == 2_000
    assert timings.first_token_ms == round(1_000 * (began + 0.5 - 100.0))
