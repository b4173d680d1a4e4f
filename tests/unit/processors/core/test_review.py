"""What a review of the flow found: words that change their number, places that are never given back, long walks."""

from __future__ import annotations

import pytest

from flow_driver import LOW, MEDIUM, Finished, World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.core.work.states import Stage
from penstock.schemas.errors import EngineFailed, Overloaded


def test_words_keep_the_number_of_the_run_that_said_them() -> None:
    """A process tells its last words and its failure together: both are heard before anything is published."""
    world = ready(inline=True)
    work = world.submit("r", stream=True)
    run_id = work.run.run_id
    world.flow.output.delta(work.subject, run_id, "old", [1], world.now)
    world.flow.attempts.failed(work.subject, run_id, EngineFailed("it ran out of memory"), world.now, again=True)
    world.settle()
    (chunk,) = world.chunks
    assert work.attempt == 2
    assert chunk.subject.attempt == 1


def test_words_keep_the_epoch_of_the_run_that_said_them() -> None:
    world = ready(inline=True)
    work = world.submit("r", stream=True)
    world.flow.output.delta(work.subject, work.run.run_id, "old", [1], world.now)
    world.assigned(2)
    world.flow.replicas.down("m", 0, world.now)
    world.up(slots=1, replica=0, inline=True)
    world.pass_time(3.0)
    (chunk,) = world.chunks
    assert (chunk.subject.epoch, chunk.subject.attempt) == (1, 1)
    assert (work.epoch, work.attempt) == (2, 2)


def test_it_runs_again_as_running() -> None:
    """Readers fold statuses by attempt and rank: `running` after `retrying` of the same attempt is not heard."""
    world = ready(inline=True, status_linger_s=0.0)
    world.submit("r")
    world.pass_time(0.1)
    world.fail("r", EngineFailed("once"))
    world.pass_time(1.0)
    world.pass_time(0.1)
    told = [(s.status, s.subject.attempt) for s in world.effects(ask.Status)]
    assert told[-3:] == [("running", 1), ("retrying", 1), ("running", 2)]


def test_what_never_ran_is_not_said_to_be_retried() -> None:
    world = ready(slots=1, status_linger_s=0.0)
    world.submit("r")
    world.submit("waits")
    world.pass_time(0.1)
    world.die()
    told = [s.subject.request_id for s in world.effects(ask.Status) if s.status == "retrying"]
    assert told == ["r"]


@pytest.mark.parametrize("end", ["cancel", "expire", "gone"])
def test_one_that_must_run_alone_and_ends_while_it_is_read_again_holds_nobody_up(end: str) -> None:
    world = World(intake_bytes=1200)
    world.died_of = {"alone": 2}
    world.submit("first", size=150, ttl_ms=60_000)
    work = world.submit("alone", size=150, ttl_ms=60_000)
    assert work.stage is Stage.PARKED
    world.hold_answers = {ask.Fetch}
    world.up(inline=True)
    world.finish("first")
    assert work.stage is Stage.FETCHING
    assert world.flow.claim.holder is work
    if end == "cancel":
        world.cancel("alone")
        world.release(ask.Fetch)
    elif end == "expire":
        world.pass_time(61)
        world.release(ask.Fetch)
    else:
        world.flow.arrivals.gone(work.key, world.now)
        world.settle()
    world.submit("next", size=10)
    world.pass_time(0.1)
    assert "next" in world.started


def test_others_wait_for_seconds_only_while_one_that_must_run_alone_is_prepared() -> None:
    """Its image lies in a store that hangs: nothing started on the worker for a minute, and again after another."""
    world = World("m", "other")
    world.died_of = {"alone": 2}
    world.hold_answers = {ask.Prepare}
    work = world.submit("alone", model="m", ttl_ms=None)
    world.up("m")
    world.up("other", inline=True)
    assert work.stage is Stage.PREPARING
    world.submit("next", model="other", ttl_ms=None)
    assert not world.running
    waited = 0.0
    while not world.running:
        world.pass_time(0.5)
        waited += 0.5
        assert waited < 7, "its holder is still being prepared"
    assert list(world.running) == ["next"]
    world.finish("next")
    world.release(ask.Prepare)
    world.pass_time(60)
    assert list(world.running) == ["alone"]


def test_one_that_must_run_alone_and_is_not_next_in_its_conversation_any_more_holds_nobody_up() -> None:
    world = World("m", "other")
    world.died_of = {"alone": 2}
    world.submit("before", MEDIUM, conversation="c", model="other")
    work = world.submit("alone", LOW, conversation="c", model="m")
    world.hold_answers = {ask.Prepare}
    world.up("m")
    assert world.flow.claim.holder is work
    world.reprioritize("alone", 5)
    world.release(ask.Prepare)
    world.up("other")
    world.pass_time(0.1)
    assert "before" in world.started


def test_an_engine_is_told_the_priority_that_a_command_gave() -> None:
    world = World()
    world.submit("r", LOW)
    world.reprioritize("r", 2)
    world.up()
    world.pass_time(0.1)
    prepared = world.effects(ask.Prepare)
    assert [effect.subject.priority for effect in prepared] == [2]


def test_those_who_waited_for_a_model_that_cannot_be_loaded_end_some_at_a_time() -> None:
    world = World()
    for n in range(1000):
        world.submit(f"r{n}", settle=False)
    world.settle()
    world.flow.replicas.load_failed("m", 0, CannotLoad("no such file"), world.now)
    world.flow.step(world.now)
    ends = [effect for effect in world.flow.take_effects() if isinstance(effect, ask.Terminal)]
    assert 0 < len(ends) <= 256
    for effect in ends:
        world.answer(effect)
    for _ in range(10):
        world.pass_time(0.01)
    assert len(world.ended) + len(ends) >= 1000


def test_a_model_that_is_loaded_after_all_fails_nobody_more() -> None:
    world = World()
    for n in range(600):
        world.submit(f"r{n}", settle=False)
    world.settle()
    world.load_failed(CannotLoad("no such file"))
    failed = len(world.ended)
    world.up(inline=True)
    world.pass_time(0.01)
    world.pass_time(0.01)
    assert len(world.ended) == failed < 600


def test_a_flood_that_expires_at_once_ends_some_at_a_time() -> None:
    world = World()
    for n in range(3000):
        world.submit(f"r{n}", ttl_ms=1000, settle=False)
    world.settle()
    world.now += 2
    world.wall_ms += 2000
    world.flow.tick(world.now, world.wall_ms)
    ends = [effect for effect in world.flow.take_effects() if isinstance(effect, ask.Terminal)]
    assert 0 < len(ends) <= 512
    for effect in ends:
        world.answer(effect)
    for _ in range(20):
        world.pass_time(0.01)
    assert len(world.ended) == 3000


def test_another_record_at_the_offset_of_held_work_ends_that_silently() -> None:
    """A topic that was made anew: what ran for the old record must not complete the new one's offset."""
    world = ready(inline=True)
    old = world.submit("old")
    run_id = old.run.run_id if old.run else ""
    world.assigned(2)
    world.offsets[(MEDIUM, 0)] = 0
    world.submit("new", settle=False)
    world.settle()
    assert old.stage is Stage.DROPPED
    world.flow.attempts.finished(old.subject, run_id, Finished(), world.now, large=False)
    world.settle()
    assert world.committed() == 0
    world.finish("new")
    assert world.ended == [("new", "completed")]
    assert world.committed() == 1


def test_what_fails_while_the_worker_stops_is_handed_back_at_once() -> None:
    world = ready(slots=2, inline=True)
    world.submit("fails")
    world.submit("dies")
    world.flow.stop_taking()
    world.fail("fails", EngineFailed("once"))
    world.pass_time(0.01)
    assert world.flow.running == 1
    world.die()
    world.pass_time(0.01)
    assert not world.flow.works


def test_who_waits_for_a_retry_ends_at_its_deadline_and_a_flood_of_retries_is_spread() -> None:
    world = ready(slots=1000, inline=True, aging_s=1e9)
    for n in range(600):
        world.submit(f"r{n}", ttl_ms=5_000 if n < 10 else None, settle=False)
    world.settle()
    for n in range(600):
        world.fail(f"r{n}", Overloaded("later", retry_after_s=30))
    world.pass_time(4.9)
    assert world.ended == []
    world.pass_time(0.2)
    assert world.ended == [(f"r{n}", "expired") for n in range(10)]
    world.pass_time(36)
    assert 0 < len(world.running) <= 256
    for _ in range(3):
        world.pass_time(0.01)
    assert len(world.running) == 590
