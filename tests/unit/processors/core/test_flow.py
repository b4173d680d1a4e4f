"""The flow, event by event: each defect that was found in the old heart is one test here."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import EMBEDDING, HIGH, LOW, MEDIUM, World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.residents import ModelSpec
from penstock.processors.core.requests.registry import ENDINGS_IN_ALL, ENDINGS_PER_PARTITION
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.retries import RetrySettings
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.suspects import suspect_all
from penstock.processors.engines.base import Finished
from penstock.schemas.errors import BadAvro, EngineFailed, InvalidRequest, Overloaded


def ids(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{n}" for n in range(count)]


def test_a_request_goes_all_the_way_and_its_offset_waits_for_the_acknowledged_outcome() -> None:
    world = World()
    work = world.submit("r")
    assert world.loads == ["m"]
    world.up()
    assert work.stage is Stage.RUNNING
    world.hold_answers = {ask.Terminal}
    world.finish("r")
    assert world.committed() == 0
    world.release(ask.Terminal)
    assert (world.ended, world.committed()) == ([("r", "completed")], 1)
    assert not world.flow.works


def test_a_high_request_starts_before_low_ones_that_do_not_run() -> None:
    """Defect 4: 64 slots, room for 8 runs: a high request ended after 64 low ones."""
    world = World()
    world.need = lambda work: 100
    world.up(slots=64, tokens=800)
    for name in ids("l", 64):
        world.submit(name, LOW)
    assert len(world.running) == 8
    world.submit("h", HIGH)
    world.finish(next(iter(world.running)))
    assert world.started[-1] == "h"


def test_what_fits_passes_what_does_not_until_room_is_kept_for_it() -> None:
    world = World()
    world.need = lambda work: 900 if work.request_id == "big" else 100
    world.up(slots=64, tokens=1000)
    for name in ids("s", 5):
        world.submit(name)
    world.submit("big")
    world.submit("small")
    assert "small" in world.running, "it fits and need not wait"
    world.pass_time(1.5)
    world.submit("late")
    for name in ids("s", 5):
        world.finish(name)
    assert "late" not in world.running, "room is kept for the big one now"
    world.finish("small")
    assert "big" in world.running


def test_a_poisonous_prompt_takes_no_other_along() -> None:
    """Defect 3: 63 good requests beside 1 poison one, three deaths: 64 dead letters."""
    world = ready(slots=64, inline=True)
    names = [*ids("good", 40), "poison", *ids("fine", 23)]
    for name in names:
        world.submit(name, settle=False)
    world.settle()
    deaths = 0
    for _ in range(400):
        if "poison" in world.running:
            deaths += 1
            world.die()
            world.up(slots=64, inline=True)
        elif world.running:
            world.finish(next(iter(world.running)))
        elif world.flow.works:
            world.pass_time(1.0)
        else:
            break
    assert world.letters == ["poison"]
    outcomes = dict(world.ended)
    assert outcomes.pop("poison") == "dead_lettered"
    assert set(outcomes.values()) == {"completed"}
    assert len(outcomes) == 63
    assert deaths <= 8, "halves, not one by one"


def test_innocents_do_not_spend_attempts_but_published_words_get_a_new_number() -> None:
    world = ready(slots=2, inline=True)
    streaming = world.submit("a", stream=True)
    quiet = world.submit("b")
    world.delta("a", "some words")
    world.die()
    assert (streaming.spent, quiet.spent) == (1, 1)
    assert (streaming.attempt, quiet.attempt) == (2, 1)


def test_a_model_that_cannot_be_loaded_fails_what_waits_and_is_tried_again() -> None:
    """Defect 8: an engine that could not be restarted was tried for ever while all was told to be well."""
    world = ready(inline=True)
    world.submit("runs")
    world.die()
    world.pass_time(0.01)
    assert world.loads == ["m"]
    for _ in range(3):
        world.load_failed(EngineFailed("its process dies at the start"))
        world.pass_time(5.0)
    assert world.status_of("runs") == "failed"
    assert world.flow.lane("m").lost, "readiness says so"
    world.submit("later")
    assert world.status_of("later") is None, "the next one starts another try"
    world.pass_time(30.0)
    assert world.loads[-1] == "m"
    world.up(inline=True)
    assert not world.flow.lane("m").lost
    assert "later" in world.running


def test_a_failed_lane_touches_only_what_waits() -> None:
    """Defect 12: it could settle work whose dead letter was not acknowledged yet, and overrule a standing answer."""
    world = World()
    world.hold_answers = {ask.PublishDeadLetter, ask.CheckForAnswer}
    letter = world.poison(BadAvro("no"), "named")
    world.submit("turn", conversation="c")
    world.cancel("turn")
    world.load_failed(InvalidRequest("never"))
    assert letter.stage is Stage.DEAD_LETTERING
    assert world.ended == []
    world.release(ask.PublishDeadLetter)
    world.release(ask.CheckForAnswer)
    assert sorted(world.ended) == [("named", "dead_lettered"), ("turn", "cancelled")]


def test_who_waits_behind_a_failed_load_runs_on_a_replica_that_has_come_back() -> None:
    """Simulator, seed 38707: it was prepared there, and then ended in a way that the table of states does not have."""
    world = ready(slots=4)
    world.submit("runs")
    world.flow.orders.desire("m", False, None)
    world.settle()
    world.hold_answers = {ask.CheckForAnswer, ask.Prepare}
    turn = world.submit("turn", conversation="c")
    behind = world.submit("behind", conversation="c")
    world.load_failed(InvalidRequest("never"), replica=1)
    assert turn.stage is Stage.CHECKING_FOR_ANSWER
    world.flow.orders.desire("m", True, None)
    world.release(ask.CheckForAnswer)
    world.pass_time(1.0)
    assert behind.stage is Stage.PREPARING
    world.release(ask.Prepare)
    assert (behind.stage, world.ended) == (Stage.RUNNING, [("turn", "failed")])


def test_a_turn_on_a_failed_lane_ends_with_the_answer_that_stands_in_its_conversation() -> None:
    """A worker that died before it published the outcome had appended the answer: *failed* would contradict the log."""
    world = World()
    world.hold_answers = {ask.CheckForAnswer}
    turn = world.submit("turn", conversation="c")
    world.submit("plain")
    world.load_failed(InvalidRequest("never"))
    assert turn.stage is Stage.CHECKING_FOR_ANSWER
    assert world.ended == [("plain", "failed")]
    world.answer_checked(turn, STANDS)
    assert ("turn", "completed") in world.ended


def test_an_erased_request_that_is_delivered_again_does_not_run() -> None:
    """Its worker was killed before the commit. An answer that stands is not told again, and is erased."""
    world = ready()
    world.hold_answers = {ask.CheckForAnswer}
    world.cancel("r", kind="erase")
    (erase,) = world.effects(ask.Erase)
    world.book.erasure_done(erase.command)
    world.submit("r", conversation="c")
    assert (world.started, world.ended) == ([], [("r", "cancelled")])
    assert [one.held for one in world.effects(ask.Erase)] == [False, True]


HELD = {"preparing": ask.Prepare, "beginning": ask.Begin, "storing": ask.StoreOutput}
"""Of which effect no answer comes in this stage."""


def at_stage(stage: str) -> World:
    """A turn `r` of the conversation `c` in this stage."""
    world = World() if stage == "queued" else ready(slots=0 if stage == "ready" else 1)
    world.hold_answers = {HELD[stage]} if stage in HELD else set()
    work = world.submit("r", conversation="c")
    world.pass_time(0.02)
    if stage == "retrying":
        world.fail("r", EngineFailed("broken"))
    elif stage == "storing":
        world.finish("r")
    assert work.stage.value == stage
    return world


@pytest.mark.parametrize("kind", ["cancel", "erase"])
@pytest.mark.parametrize("stage", ["queued", "preparing", "ready", "beginning", "running", "retrying", "storing"])
def test_a_cancel_ends_it_at_every_stage_but_after_its_end(stage: str, kind: str) -> None:
    """So does an erasure: the request runs again, after a kill. What this run leaves behind is erased too."""
    world = at_stage(stage)
    world.cancel("r", kind=kind)
    if stage == "storing":
        world.release(ask.StoreOutput)
    assert world.ended == [("r", "completed" if stage == "storing" else "cancelled")]
    assert [one.held for one in world.effects(ask.Erase)] == ([False, True] if kind == "erase" else [])
    assert not world.flow.works
    assert world.flow.lane("m").replicas[0].free_slots == world.flow.lane("m").replicas[0].slots
    follower = world.submit("next", conversation="c")
    if stage not in ("queued", "ready"):
        if stage in HELD:
            world.release(HELD[stage])
        assert follower.stage is Stage.RUNNING


@pytest.mark.parametrize("stage", ["queued", "preparing", "ready", "beginning", "running", "retrying"])
def test_a_deleted_conversation_ends_its_turns_and_no_others(stage: str) -> None:
    world = at_stage(stage)
    world.submit("behind", LOW, conversation="c")
    world.submit("other", conversation="d")
    world.submit("alone")
    world.wall_ms += 1
    world.submit("of another tenant", tenant="t", conversation="t.c")
    world.delete_conversation("c")
    assert sorted(world.ended) == [("behind", "cancelled"), ("r", "cancelled")]
    (error,) = {one.error for one in world.effects(ask.Terminal) if one.subject.request_id == "r"}
    assert str(error) == "its conversation was deleted"
    world.wall_ms += 1
    world.submit("next", conversation="c")
    assert len(world.ended) == 2, "what was sent after the deletion waits or runs"


def test_a_turn_that_was_sent_before_the_deletion_ends_when_it_arrives_later() -> None:
    world = ready(slots=8)
    sent_ms = world.wall_ms
    world.wall_ms += 5
    world.delete_conversation("c")
    world.wall_ms = sent_ms
    world.submit("before", conversation="c")
    world.submit("no turn of it")
    world.wall_ms += 5
    world.submit("at the same time", conversation="c")
    world.wall_ms += 1
    world.submit("after", conversation="c")
    assert world.ended == [("before", "cancelled"), ("at the same time", "cancelled")]
    assert sorted(world.running) == ["after", "no turn of it"]


def test_a_summary_ends_with_its_conversation_and_runs_beside_its_turns() -> None:
    world = ready(slots=4)
    world.submit("turn", conversation="c")
    world.submit("summary", conversation_id="c", task="summarization")
    assert world.started == ["turn", "summary"], "no turn holds it up"
    world.submit("late", conversation_id="c", task="summarization", settle=False)
    world.delete_conversation("c")
    assert sorted(world.ended) == [("late", "cancelled"), ("summary", "cancelled"), ("turn", "cancelled")]


def test_the_output_of_what_takes_no_turn_is_appended_where_its_topic_is_known() -> None:
    world = World()
    world.hold_answers = {ask.StoreOutput}
    world.up(slots=4)
    world.appends = "what was read"
    world.submit("summary", conversation_id="c", task="summarization")
    world.finish("summary")
    (keep,) = world.asked
    assert keep.to == "what was read"
    world.release(ask.StoreOutput)
    assert world.ended == [("summary", "completed")]


def test_a_parked_turn_of_a_deleted_conversation_is_read_again_to_end() -> None:
    world = World(intake_bytes=10_000)
    for number in range(200):
        world.submit(f"r{number}", conversation="c" if number == 199 else None)
    (parked,) = [work for work in world.flow.works.values() if work.conversation == "c"]
    assert parked.stage is Stage.PARKED
    world.delete_conversation("c")
    assert world.ended == [("r199", "cancelled")]


def test_deadlines_end_what_waits_and_not_what_runs() -> None:
    world = ready(inline=True)
    world.submit("runs", ttl_ms=1000)
    world.submit("waits", ttl_ms=1000)
    world.pass_time(2.0)
    assert world.ended == [("waits", "expired")]
    world.finish("runs")
    assert world.ended[1:] == [("runs", "completed")]


@pytest.mark.parametrize(
    ("of_model_s", "own_ms", "runs_s"),
    [
        (None, None, 60.0),
        (None, 500, 0.5),
        (5.0, None, 5.0),
        (300.0, None, 300.0),
        (300.0, 2000, 2.0),
        (5.0, 10_000, 5.0),
    ],
)
def test_a_model_may_have_its_own_longest_run(of_model_s: float | None, own_ms: int | None, runs_s: float) -> None:
    """In place of the worker's; the request's own can only shorten it."""
    world = World(max_execution_s=60.0)
    world.flow.orders.configure({"m": ModelSpec(model="m", max_execution_s=of_model_s)}, world.now)
    world.up(inline=True)
    world.submit("r", execution_timeout_ms=own_ms, max_attempts=1)
    world.pass_time(runs_s - 0.5)
    assert not world.ended
    world.pass_time(1.0)
    assert (world.ended, world.running) == ([("r", "dead_lettered")], {})


def test_far_requests_are_parked_and_read_again_in_order() -> None:
    world = World(intake_bytes=1 << 20)
    for name in ids("r", 200):
        world.submit(name, size=20_000, settle=False)
    parked = [w for w in world.flow.works.values() if w.stage is Stage.PARKED]
    assert len(parked) > 100
    assert all(work.body is None for work in parked)
    world.up(inline=True)
    for _ in range(200):
        (running,) = world.running
        world.finish(running)
    assert world.started == ids("r", 200)
    assert world.committed() == 200


def test_a_parked_request_that_is_cancelled_echoes_its_metadata() -> None:
    world = World(intake_bytes=1 << 20)
    for name in ids("r", 60):
        world.submit(name, size=20_000)
    parked = next(w for w in world.flow.works.values() if w.stage is Stage.PARKED)
    world.cancel(parked.request_id)
    terminal = next(e for e in world.effects(ask.Terminal))
    assert terminal.status == "cancelled"
    assert terminal.subject.body is not None, "its bytes were read again for its outcome"


def test_many_parked_requests_that_end_at_once_keep_to_the_budget() -> None:
    """Found by the simulator (seed 336): the bytes of all of them were read again at once."""
    world = World(intake_bytes=1 << 20)
    for name in ids("r", 200):
        world.submit(name, size=20_000, settle=False)
    names = [w.request_id for w in world.flow.works.values() if w.stage is Stage.PARKED]
    assert len(names) > 150
    world.hold_answers = {ask.Terminal}
    for name in names:
        world.cancel(name)
    assert world.flow.budget.used_bytes <= 1 << 20
    world.release(ask.Terminal)
    assert sorted(world.ended) == sorted((name, "cancelled") for name in names)


def test_parked_requests_that_end_are_read_in_ranges_and_let_go_of_with_their_partition() -> None:
    world = World(intake_bytes=1 << 20)
    world.hold_answers = {ask.Fetch}
    for name in ids("r", 200):
        world.submit(name, size=20_000, settle=False)
    world.asked.clear()
    names = [w.request_id for w in world.flow.works.values() if w.stage is Stage.PARKED]
    for name in names:
        world.cancel(name)
    asked = sum(len(effect.offsets) for effect in world.asked if isinstance(effect, ask.Fetch))
    assert 0 < asked <= (1 << 20) // 8 // 20_000
    world.release(ask.Fetch)
    ranges = [effect.offsets for effect in world.effects(ask.Fetch)]
    assert len(ranges) < len(names) // 2
    assert sorted(world.ended) == sorted((name, "cancelled") for name in names)


def test_a_flood_of_dead_letters_pauses_its_partition_alone() -> None:
    world = World()
    world.hold_answers = {ask.PublishDeadLetter}
    for _ in range(600):
        world.poison(BadAvro("no"))
    assert world.flow.pauses() == {(MEDIUM, 0)}
    world.release(ask.PublishDeadLetter)
    assert world.flow.pauses() == frozenset()


def test_large_dead_letters_pause_their_partition_by_their_bytes() -> None:
    world = World()
    world.hold_answers = {ask.PublishDeadLetter}
    for number in range(10):
        world.poison(BadAvro("no"), value=b"x" * 2**20)
        assert world.flow.pauses() == (frozenset() if number < 7 else {(MEDIUM, 0)})
    world.release(ask.PublishDeadLetter)
    assert world.flow.pauses() == frozenset()


ENDS: dict[str, tuple[type, dict[str, Any]]] = {
    "publishing": (ask.Terminal, {"error": InvalidRequest("no")}),
    "moving": (ask.Republish, {"belongs_on": 3}),
    "checking_for_answer": (ask.CheckForAnswer, {"conversation_id": "c", "ttl_ms": 0}),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_partition_has_a_bounded_number_of_ends_under_way(end: str) -> None:
    """The broker answers nothing, and the consumer delivers while the partition is not paused. Others go on."""
    kind, fields = ENDS[end]
    world = World()
    world.hold_answers = {kind}
    delivered = 0
    while (MEDIUM, 0) not in world.flow.pauses():
        assert delivered < ENDINGS_PER_PARTITION, "the ends under way have no bound"
        world.submit(f"r{delivered}", **fields)
        delivered += 1
    assert world.flow.pauses() == {(MEDIUM, 0)}
    assert len(world.asked) == delivered == ENDINGS_PER_PARTITION
    answered, world.asked = world.asked[: delivered // 2], world.asked[delivered // 2 :]
    for effect in answered:
        world.answer(effect)
    assert world.flow.pauses() == {(MEDIUM, 0)}, "it does not flap"
    world.release(kind)
    assert world.flow.pauses() == frozenset()


def test_nothing_starts_while_too_many_ends_are_under_way() -> None:
    world = World()
    world.hold_answers = {ask.Terminal}
    world.up()
    for name in ids("ended", ENDINGS_IN_ALL):
        world.submit(name, error=InvalidRequest("no"))
    world.submit("waits")
    assert world.started == []
    world.release(ask.Terminal)
    world.pass_time(0.1)
    assert world.started == ["waits"]


def test_what_two_workers_died_of_runs_alone() -> None:
    world = World()
    world.died_of = {"bad": 2}
    world.up(slots=4, inline=True)
    world.submit("before")
    world.submit("bad", max_attempts=5)
    world.submit("after")
    assert list(world.running) == ["before"]
    world.finish("before")
    assert list(world.running) == ["bad"]
    world.finish("bad")
    assert list(world.running) == ["after"]


def test_running_work_is_kept_over_an_orderly_rebalance_and_not_over_a_fence() -> None:
    world = ready(slots=1, inline=True)
    world.submit("runs")
    world.assigned(2)
    assert "runs" in world.running
    assert world.running["runs"].epoch == 1
    world.assigned(5)
    assert not world.running
    assert not world.flow.works


def test_an_orderly_stop_hands_back_what_waits_and_finishes_what_runs() -> None:
    world = ready(slots=1, inline=True)
    world.submit("runs")
    world.submit("waits")
    world.flow.stop_taking()
    world.settle()
    assert [work.request_id for work in world.flow.works.values()] == ["runs"]
    world.finish("runs")
    assert world.ended == [("runs", "completed")]
    assert world.committed() == 1


def test_streams_go_out_at_once_and_then_gathered() -> None:
    world = ready(slots=1, inline=True)
    world.submit("r", stream=True)
    for word in ("a ", "b ", "c "):
        world.delta("r", word)
    assert [chunk.text for chunk in world.chunks] == ["a "]
    world.pass_time(0.05)
    world.delta("r", "d")
    world.finish("r")
    assert [chunk.text for chunk in world.chunks] == ["a ", "b c ", "d"]
    assert [chunk.text_offset for chunk in world.chunks] == [0, 2, 6]


@pytest.mark.parametrize("how", ["fails", "dies"])
def test_what_has_gathered_is_published_before_the_next_run(how: str) -> None:
    """It was made again, up to a linger's worth of tokens."""
    world = ready(slots=1, inline=True)
    world.submit("r", stream=True)
    for word in ("a ", "b ", "c "):
        world.delta("r", word)
    if how == "fails":
        world.fail("r", EngineFailed("it broke off"))
    else:
        world.die()
        world.up(slots=1, inline=True)
    world.pass_time(1.0)
    assert [chunk.text for chunk in world.chunks] == ["a ", "b c "]
    again = world.effects(ask.Start)[-1]
    assert (again.published.text, again.published.since) == ("a b c ", (1, 1))


def test_text_without_tokens_is_told_to_the_next_run() -> None:
    """Engines of remote models know no tokens."""
    world = ready(slots=1, inline=True)
    work = world.submit("r", stream=True)
    world.flow.output.delta(work.subject, work.run.run_id, "a ", [], world.now)
    world.fail("r", EngineFailed("it broke off"))
    world.pass_time(1.0)
    again = world.effects(ask.Start)[-1]
    assert again.published == PublishedPrefix("m", "a ", (), (), (1, 1))


@pytest.mark.parametrize("waits_s", [0.0, 1.0], ids=["at once", "queued again"])
def test_a_turn_that_is_refused_behind_one_of_another_class_stays_before_the_later_ones_of_its_own(
    waits_s: float,
) -> None:
    """Found by the simulator: it held a line that was another's, and the next turn of its class went first."""
    world = World()
    world.hold_answers = {ask.Prepare}
    world.up(slots=4)
    high = world.submit("high", HIGH, conversation="c")
    low, later = (world.submit(name, LOW, conversation="c") for name in ("low-1", "low-2"))
    world.pass_time(0.02)
    assert (high.stage, low.stage) == (Stage.PREPARING, Stage.PREPARING)
    world.hold_answers = set()
    world.prepare(high)
    assert high.stage is Stage.RUNNING
    world.refuse(low, Overloaded("busy"))
    if waits_s:
        world.pass_time(waits_s)
        assert low.stage is Stage.QUEUED
    world.finish("high")
    assert (low.stage, later.stage, low.attempt) == (Stage.RUNNING, Stage.QUEUED, 2)


def test_a_death_blames_what_was_prepared_as_well_as_what_ran() -> None:
    """Found by the simulator: a prompt that kills while it is counted cost the only run its attempts."""
    world = ready(slots=4)
    innocent = world.submit("innocent", max_attempts=1)
    assert innocent.stage is Stage.RUNNING
    world.hold_answers = {ask.Prepare}
    world.submit("killer")
    world.die()
    assert innocent.spent == 1
    assert world.letters == []


def test_suspects_wait_for_their_conversation() -> None:
    """Found by the simulator: a suspect was granted while another turn of its conversation was under way."""
    world = ready(slots=4)
    world.hold_answers = {ask.Prepare}
    turn, other = world.submit("low", LOW, conversation="c"), world.submit("high", HIGH, conversation="c")
    world.pass_time(0.02)
    world.die()
    world.hold_answers = set()
    world.up(slots=4)
    world.pass_time(0.02)
    running = [work for work in (turn, other) if work.stage is Stage.RUNNING]
    assert len(running) == 1
    world.finish(running[0].request_id)
    assert {turn.stage, other.stage} == {Stage.RUNNING, Stage.DONE}


def two_replicas(slots: int, **settings: Any) -> World:
    world = World(**settings)
    for number in (0, 1):
        world.up(slots=slots, replica=number)
    return world


@pytest.mark.parametrize("runs", [False, True])
def test_a_group_of_suspects_has_one_replica(runs: bool) -> None:
    """Found by the simulator (seed 30090): drained, replaced and taken back, two took them from each other for ever."""
    world = two_replicas(4)
    lane = world.flow.lane("m")
    suspect = world.submit("suspect", settle=False)
    suspect_all([suspect, suspect])
    world.hold_answers = {ask.Prepare}
    world.settle()
    (first,) = [one for one in lane.ready if one.exclusive is not None]
    if runs:
        world.release(ask.Prepare)
        assert suspect.stage is Stage.RUNNING
    world.flow.lifecycle.drain(lane, first, "too_small", None)
    (other,) = lane.ready
    other.exclusive = suspect.group
    assert world.flow.lifecycle.undo_drain("m", first.number)
    assert [one for one in lane.ready if one.exclusive] == [first if runs else other]


def test_a_suspect_leaves_the_others_when_they_fill_their_replica_and_another_is_empty() -> None:
    """Simulator, seed 49041: it waited for a slot that a long run of its group held, beside an empty replica."""
    world = two_replicas(1)
    first, second = (world.submit(name, settle=False) for name in ("first", "second"))
    suspect_all([first, second])
    world.settle()
    world.pass_time(1.0)
    assert {first.stage, second.stage} == {Stage.RUNNING}
    assert first.group is not second.group
    world.submit("third")
    world.pass_time(1.0)
    assert "third" not in world.running, "nobody else runs beside a suspect"


def test_a_suspect_takes_an_empty_replica_though_one_before_it_waits_for_another_replica() -> None:
    """Simulator, seed 34752: the first in the queue waited for a replica that other suspects had, all others behind."""
    world = two_replicas(4, affinity_s=60.0)
    lane = world.flow.lane("m")
    first = world.submit("first", settle=False)
    suspect_all([first])
    world.settle()
    (kept,) = [one for one in lane.ready if one.exclusive is not None]
    lane.remember_prefix("c", kept)
    world.submit("turn", HIGH, conversation="c")
    second = world.submit("second", settle=False)
    suspect_all([second])
    world.settle()
    world.pass_time(1.0)
    assert world.running.keys() == {"first", "second"}


def test_what_was_stopped_a_moment_before_may_have_killed_the_engine() -> None:
    """Found by the simulator: a killer was cancelled, the engine died, and the one run beside it was dead-lettered."""
    world = ready(slots=2, inline=True)
    innocent = world.submit("innocent", max_attempts=1)
    world.submit("killer")
    world.cancel("killer")
    world.die()
    assert innocent.spent == 1
    assert world.letters == []
    world.up(slots=2, inline=True)
    world.pass_time(2.0)
    world.die()
    assert world.letters == ["innocent"], "alone, with nothing stopped beside it"


def test_an_answer_of_an_earlier_run_stands_under_a_new_number() -> None:
    """Found by the simulator: readers had seen this run's words, and the outcome's text was another's."""
    world = ready(slots=1)
    world.hold_answers = {ask.StoreOutput}
    work = world.submit("r", conversation="c", stream=True)
    world.delta("r", "my words")
    world.finish("r")
    world.flow.durable.stored(work.subject, None, None, world.now, another=True)
    world.settle()
    terminal = next(e for e in world.effects(ask.Terminal))
    assert (terminal.subject.attempt, work.spent) == (2, 1)


def test_each_place_of_a_request_has_its_outcome_before_it_is_committed() -> None:
    """Found by the simulator: readers followed the duplicate's origin, and never saw an outcome."""
    world = ready()
    world.submit("r", HIGH)
    world.submit("r", LOW)
    world.hold_answers = {ask.Terminal}
    world.finish("r")
    for _ in range(2):
        assert world.committed(HIGH) == world.committed(LOW) == 0
        (work,) = world.flow.works.values()
        world.flow.published(work.subject, "completed")
        world.settle()
    asked = [effect.origin for effect in world.effects(ask.Terminal)]
    assert [origin and origin.topic for origin in asked] == [None, LOW]
    assert world.committed(HIGH) == world.committed(LOW) == 1


def test_a_refused_prompt_does_not_use_up_the_aged_share() -> None:
    """Found by the simulator: nothing had started, and aged work waited for another round of starts."""
    world = ready(slots=1, aging_s=5.0, aged_share=2)
    world.hold_answers = {ask.Prepare}
    world.submit("running", HIGH)
    world.submit("aged", LOW)
    world.pass_time(6.0)
    lane = world.flow.scheduler._lanes["m"]
    before = lane.since_aged
    aged = next(work for work in world.flow.works.values() if work.request_id == "aged")
    world.refuse(aged, EngineFailed("no"))
    assert aged.stage is Stage.RETRYING
    assert lane.since_aged == before


@pytest.mark.parametrize(("later", "outcomes"), [(False, 2), (True, 1)])
def test_a_repeat_from_before_this_assignment_has_an_outcome_of_its_own(later: bool, outcomes: int) -> None:
    """Found by the simulator: an earlier worker had published under the repeat's origin, and its readers waited on."""
    world = World()
    parts = {(topic, 0): (0, "") for topic in (HIGH, MEDIUM, LOW, EMBEDDING)}
    world.flow.assigned(parts, 2, fenced=False, now=world.now, wall_ms=world.wall_ms + (0 if later else 1))
    world.up(inline=True)
    world.submit("r", HIGH)
    world.submit("r", LOW)
    world.finish("r")
    assert world.ended == [("r", "completed")] * outcomes
    assert (world.committed(HIGH), world.committed(LOW)) == (1, 1)


def test_what_lost_its_engine_before_its_status_was_due_is_not_said_to_run() -> None:
    """Found by the simulator: `running` was published of a request that waited again, or was let go of."""
    world = ready()
    work = world.submit("r")
    assert work.stage is Stage.RUNNING
    world.die()
    world.pass_time(1.0)
    assert work.stage is Stage.QUEUED
    assert "running" not in [effect.status for effect in world.effects(ask.Status)]


def test_another_pools_request_is_moved_and_committed_without_running() -> None:
    world = ready()
    work = world.submit("r", pool="other")
    moves = world.effects(ask.Republish)
    assert [(move.pool, move.partition, move.origin) for move in moves] == [("other", None, work.first_place)]
    assert (world.started, world.ended, world.letters, world.committed()) == ([], [], [], 1)


def test_a_request_for_a_pool_that_there_is_not_fails_clearly() -> None:
    world = ready()
    world.hold_answers = {ask.Republish}
    work = world.submit("r", pool="nowhere")
    world.flow.durable.cannot_move(work.subject, InvalidRequest("there is no pool nowhere", param="pool"), world.now)
    world.settle()
    assert (world.ended, world.letters, world.committed()) == ([("r", "failed")], [], 1)


def test_what_a_server_turned_away_goes_behind_what_is_more_urgent_and_spends_no_attempt() -> None:
    world = ready(slots=2, inline=True)
    low = world.submit("low", LOW)
    world.flow.replicas.limits("m", 0, 1, world.now)
    world.submit("high", HIGH)
    assert list(world.running) == ["low"]  # the limit is one now
    del world.running["low"]
    world.flow.attempts.turned_away(low.subject, low.run.run_id, Overloaded("busy"), world.now)
    world.settle()
    assert list(world.running) == ["high"]
    assert (low.stage, low.spent) == (Stage.QUEUED, 1)
    world.flow.replicas.limits("m", 0, 2, world.now)
    world.settle()
    assert sorted(world.running) == ["high", "low"]


@pytest.mark.parametrize("finished", [False, True])
def test_a_record_that_is_delivered_again_after_partitions_were_added_is_still_the_one_that_was_taken(
    finished: bool,
) -> None:
    """Found by the simulator: it was moved as if it were new, and its repeat counted as done without an outcome."""
    world = ready(inline=True)
    world.hold_answers = {ask.Terminal}
    world.submit("r", HIGH, conversation="c")
    world.submit("r", LOW, conversation="c")
    if finished:
        world.finish("r")
        world.release(ask.Terminal)
    world.submit("r", HIGH, conversation="c", belongs_on=3, offset=0)
    assert world.effects(ask.Republish) == []
    if not finished:
        assert world.committed(LOW) == 0
        world.finish("r")
        world.release(ask.Terminal)
    assert (world.committed(HIGH), world.committed(LOW)) == (1, 1)


@pytest.mark.parametrize("moved", [False, True])
def test_a_record_that_was_moved_is_not_taken_when_the_partition_has_become_its_own(moved: bool) -> None:
    """Simulator, seed 91593: partitions were added between two deliveries; it ran although it had been moved."""
    world = ready(inline=True)
    world.hold_answers = set() if moved else {ask.Republish}
    world.submit("r", HIGH, conversation="c", belongs_on=3)
    world.submit("r", HIGH, conversation="c", offset=0)
    assert not world.running
    world.release(ask.Republish)
    assert world.committed(HIGH) == 1


STANDS = Finished(run_id="", output={"text": "it stands"}, finish_reason="stop")


def test_a_turn_that_two_workers_died_of_ends_with_the_answer_that_stands_in_its_conversation() -> None:
    """The last of them had appended the answer, and died before it published the outcome."""
    world = World()
    world.died_of = dict.fromkeys(("answered", "silent", "plain"), 2)
    world.up()
    world.hold_answers = {ask.CheckForAnswer}
    turns = [world.submit(name, conversation=name, max_attempts=2) for name in ("answered", "silent")]
    for turn in turns:
        assert turn.stage is Stage.CHECKING_FOR_ANSWER
        answer = STANDS if turn.request_id == "answered" else None
        world.answer_checked(turn, answer)
    assert sorted(world.ended) == [("answered", "completed"), ("silent", "dead_lettered")]
    assert world.letters == ["silent"]
    world.submit("plain", max_attempts=2)
    assert world.letters == ["silent", "plain"]


@pytest.mark.parametrize("way", ["dies", "refused", "cancelled as it begins", "cancelled between attempts"])
def test_a_turn_of_which_no_run_has_begun_here_ends_with_the_answer_that_stands(way: str) -> None:
    """Found by the simulator (seed 11397): its engine died while it was prepared, and it got a dead letter.

    The worker before this one had answered it, and was killed before it published the outcome.
    """
    world = World(retries=RetrySettings(first_s=1.0))
    world.hold_answers = {ask.Begin if way == "cancelled as it begins" else ask.Prepare, ask.CheckForAnswer}
    world.up()
    turn = world.submit("turn", conversation="c", max_attempts=2 if way == "cancelled between attempts" else 1)
    match way:
        case "dies":
            world.die()
        case "refused":
            world.refuse(turn, InvalidRequest("no"), again=False)
        case "cancelled as it begins":
            world.cancel("turn")
        case _:
            world.die()
            assert turn.stage is Stage.RETRYING
            world.cancel("turn")
    assert turn.stage is Stage.CHECKING_FOR_ANSWER
    world.answer_checked(turn, STANDS)
    assert (world.ended, world.letters) == ([("turn", "completed")], [])


def test_a_parked_turn_whose_record_is_gone_ends_with_the_answer_that_stands_in_its_conversation() -> None:
    world = World(intake_bytes=10_000)
    for number in range(200):
        world.submit(f"r{number}", conversation="c" if number == 199 else None)
    (parked,) = [work for work in world.flow.works.values() if work.conversation == "c"]
    assert parked.stage is Stage.PARKED
    world.hold_answers = {ask.Fetch, ask.CheckForAnswer}
    world.cancel("r199")
    world.flow.arrivals.gone(parked.key, world.now)
    assert parked.stage is Stage.CHECKING_FOR_ANSWER
    assert parked.request.conversation_id == "c", "its bytes are not here, and it is looked up all the same"
    world.answer_checked(parked, STANDS)
    assert (world.status_of("r199"), world.letters) == ("completed", [])


@pytest.mark.parametrize("error", [BadAvro("it cannot be written again"), InvalidRequest("no pool")])
@pytest.mark.parametrize("stands", [False, True])
def test_a_turn_that_cannot_be_moved_ends_with_the_answer_that_stands_in_its_conversation(
    error: BadAvro | InvalidRequest, stands: bool
) -> None:
    """Found by the simulator: another record of it had been answered where its conversation is."""
    world = ready()
    world.hold_answers = {ask.Republish, ask.CheckForAnswer}
    turn = world.submit("r", conversation="c", belongs_on=3)
    world.flow.durable.cannot_move(turn.subject, error, world.now)
    assert turn.stage is Stage.CHECKING_FOR_ANSWER
    world.answer_checked(turn, STANDS if stands else None)
    failed = "failed" if isinstance(error, InvalidRequest) else "dead_lettered"
    assert world.status_of("r") == ("completed" if stands else failed)
    assert world.letters == (["r"] if failed == "dead_lettered" and not stands else [])
