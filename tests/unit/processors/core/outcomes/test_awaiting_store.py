"""Outputs that the store of artifacts does not take: asked again, cancelled, expired; and the memory that they take."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import HIGH, MEDIUM, Finished, World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import EngineFailed, StoreUnavailable

FULL = StoreUnavailable("the store of artifacts at /data failed: No space left on device")
MIB = 1 << 20


def finished(world: World, request_id: str = "r", **fields: Any) -> Work:
    """A request that has run, whose large output is on its way to the store."""
    world.hold_answers = {ask.StoreOutput}
    work = world.submit(request_id, **fields)
    world.finish(request_id, large=True, output_bytes=MIB)
    assert work.stage is Stage.STORING
    return work


def refuse(world: World, error: StoreUnavailable = FULL, *, held: Any = None, output_bytes: int = MIB) -> None:
    """The store does not take what it was asked for last."""
    keep = world.asked.pop()
    again = keep if held is None else ask.StoreOutput(keep.subject, held, keep.to, keep.deadline_ms)
    world.flow.awaiting_store.not_stored(again, error, world.now, output_bytes=output_bytes)
    world.settle()


def up(**settings: Any) -> World:
    return ready(slots=8, **settings)


def test_the_store_is_asked_again_with_growing_delays_and_no_run_is_repeated() -> None:
    world = up()
    work = finished(world)
    refuse(world, held="on disk")
    delays: list[float] = []
    for _ in range(7):
        since = world.now
        while not world.asked:
            world.pass_time(0.1)
        delays.append(round(world.now - since, 1))
        assert world.asked[0].finished == "on disk", "what the shell gave is what it gets back"
        refuse(world, held="on disk")
    assert delays == pytest.approx([0.5, 1, 2, 4, 8, 10, 10], abs=0.15)
    world.pass_time(10.1)
    world.release(ask.StoreOutput)
    assert world.ended == [("r", "completed")]
    assert (world.started, work.attempt, work.spent) == (["r"], 1, 1)
    assert world.committed(MEDIUM) == 1


def test_its_status_says_why_it_waits_and_says_it_once() -> None:
    world = up()
    finished(world)
    for _ in range(3):
        refuse(world)
        world.pass_time(10.1)
    said = [one.detail for one in world.effects(ask.Status) if one.detail]
    assert said == [f"its output waits to be stored: {FULL}"]


def test_what_the_store_never_takes_expires_with_the_cause() -> None:
    world = up()
    finished(world, ttl_ms=100_000)
    while not world.ended and world.now < 400:
        refuse(world) if world.asked else world.pass_time(1.0)
    assert world.ended == [("r", "expired")]
    assert world.now == pytest.approx(200, abs=2)
    error = world.ended_works[0].outcome.error
    assert "not stored before its deadline" in error.message
    assert "No space left on device" in error.message


def test_a_run_that_ended_near_its_deadline_has_a_minute() -> None:
    world = up()
    world.hold_answers = {ask.StoreOutput}
    world.submit("r", ttl_ms=1_000)
    world.pass_time(5.0)  # a deadline ends what waits, not what runs
    world.finish("r", large=True)
    refuse(world)
    for _ in range(50):
        world.pass_time(1.0)
        if world.asked:
            refuse(world)
    assert not world.ended
    world.pass_time(11.0)
    assert world.ended == [("r", "expired")]


def test_without_a_deadline_it_is_asked_for_ever() -> None:
    world = up()
    finished(world, ttl_ms=None)
    for _ in range(2_000):
        refuse(world) if world.asked else world.pass_time(10.1)
    world.pass_time(10.1)
    world.release(ask.StoreOutput)
    assert world.ended == [("r", "completed")]


@pytest.mark.parametrize("asked", [0, 1, 2], ids=["it waits", "asked first", "asked again"])
@pytest.mark.parametrize("taken", [True, False])
def test_a_cancel_counts_unless_the_store_takes_the_output(asked: int, taken: bool) -> None:
    world = up()
    work = finished(world)
    if asked != 1:
        refuse(world)
    if asked == 2:
        world.pass_time(1.0)
    world.cancel("r")
    if asked:
        assert (work.stage, world.ended) == (Stage.STORING, []), "the store may be taking it now"
        world.release(ask.StoreOutput) if taken else refuse(world)
    assert world.ended == [("r", "completed" if asked and taken else "cancelled")]
    world.pass_time(20.0)
    assert not world.asked


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("appended", [True, False])
def test_a_turn_is_cancelled_only_while_its_answer_does_not_stand(appended: bool, asked: bool) -> None:
    world = up()
    finished(world, conversation="c")
    (keep,) = world.asked
    assert keep.to == "topic"
    if appended:
        world.asked = [ask.StoreOutput(keep.subject, keep.finished, None, keep.deadline_ms)]
    if asked:
        world.delete_conversation("c")
    refuse(world)
    if not asked:
        world.delete_conversation("c")
    assert world.ended == ([] if appended else [("r", "cancelled")])


@pytest.mark.parametrize("cause", ["failed", "cancelled", "expired"])
@pytest.mark.parametrize("stands", [True, False])
@pytest.mark.parametrize("kind", ["turn", "summary"])
def test_what_may_have_been_appended_is_looked_for_before_its_request_ends(kind: str, stands: bool, cause: str) -> None:
    """An append whose acknowledgement is missing may stand. Only the conversation can say whether it does."""
    world = up()
    if kind == "summary":
        world.appends = "what was read"
    fields = {"conversation": "c"} if kind == "turn" else {"conversation_id": "c", "task": "summarization"}
    work = finished(world, ttl_ms=1_000, **fields)
    world.hold_answers = {ask.StoreOutput, ask.CheckForAnswer}
    if cause == "failed":
        world.flow.durable.store_failed(world.asked.pop(), EngineFailed("lost"), world.now)
        world.settle()
    else:
        refuse(world)
        world.cancel("r") if cause == "cancelled" else world.pass_time(61.0)
    assert (work.stage, world.ended) == (Stage.CHECKING_FOR_ANSWER, [])
    (look,) = world.asked
    world.answer_checked(look, Finished() if stands else None)
    assert world.ended == [("r", "completed" if stands else cause)]


def test_an_answer_that_was_found_after_pieces_were_published_has_an_attempt_of_its_own() -> None:
    """It may be that of another run: readers must not take it for the end of these pieces."""
    world = up()
    world.hold_answers = {ask.StoreOutput, ask.CheckForAnswer}
    world.submit("r", conversation="c", stream=True)
    world.delta("r", "words")
    world.finish("r")
    world.flow.durable.store_failed(world.asked.pop(), EngineFailed("lost"), world.now)
    world.settle()
    world.answer_checked(world.asked.pop(), Finished())
    (terminal,) = world.effects(ask.Terminal)
    assert (terminal.status, terminal.subject.attempt, terminal.since) == ("completed", 2, None)


@pytest.mark.parametrize("line", ["c", None])
def test_a_failure_to_store_what_is_known_to_stand_ends_its_request(line: str | None) -> None:
    """A second look would find the same answer, for ever."""
    world = up()
    finished(world, conversation=line)
    keep = world.asked.pop()
    known = ask.StoreOutput(keep.subject, keep.finished, None, keep.deadline_ms)
    world.flow.durable.store_failed(known, EngineFailed("too large"), world.now)
    world.settle()
    assert world.ended == [("r", "failed")]


def test_what_was_let_go_of_is_not_asked_for_again() -> None:
    world = up()
    work = finished(world)
    refuse(world)
    world.assigned(2, ())
    assert work.stage is Stage.DROPPED
    world.pass_time(20.0)
    assert not world.asked
    assert world.flow.registry.output_bytes == 0


def test_an_answer_that_comes_late_changes_nothing() -> None:
    world = up()
    finished(world)
    (keep,) = world.asked
    refuse(world)
    world.cancel("r")
    world.flow.awaiting_store.not_stored(keep, FULL, world.now, output_bytes=MIB)
    world.flow.durable.stored(keep.subject, keep.finished, None, world.now)
    world.settle()
    assert world.ended == [("r", "cancelled")]


# -- memory


def test_nothing_starts_while_outputs_fill_their_memory_and_the_reason_is_told() -> None:
    world = up(output_bytes=2 * MIB)
    world.hold_answers = {ask.Terminal}  # the broker is away
    for name in ("a", "b"):
        world.submit(name)
        world.finish(name, output_bytes=MIB)
    assert world.flow.registry.output_bytes == 2 * MIB
    work = world.submit("c", HIGH)
    assert world.started == ["a", "b"]
    waiting = world.flow.waiting_for(work, world.now)
    assert (waiting.reason, waiting.need_bytes, waiting.estimated_start_at) == ("memory", None, None)
    world.release(ask.Terminal)
    world.pass_time(0.01)
    assert world.started == ["a", "b", "c"]
    assert world.flow.registry.output_bytes == 0


def test_an_output_on_disk_takes_no_memory() -> None:
    world = up(output_bytes=2 * MIB)
    for name in ("a", "b"):
        finished(world, name)
        refuse(world, output_bytes=0)
    assert world.flow.registry.output_bytes == 0
    world.submit("c")
    assert "c" in world.running


def test_what_became_an_artifact_takes_no_memory_on_its_way_to_the_broker() -> None:
    world = up()
    finished(world)
    world.hold_answers = {ask.Terminal}
    (keep,) = world.asked
    world.flow.durable.stored(keep.subject, None, "artifact", world.now, output_bytes=0)
    assert world.flow.registry.output_bytes == 0
