"""Attempts as their shells report them: refused by size, begun again, ended well; and what a model learns of them."""

from __future__ import annotations

from flow_driver import Finished, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.work.states import Stage
from penstock.schemas.errors import EngineFailed


def test_a_prompt_that_no_replica_can_hold_is_refused_with_its_figures() -> None:
    world = ready(tokens=1_000)
    world.up(tokens=2_000, replica=1)
    world.need = lambda work: 2_001
    work = world.submit("r")
    assert world.ended == [("r", "failed")]
    error = work.outcome.error
    assert error.details == {"need": 2_001, "capacity": 2_000, "unit": "tokens"}
    assert str(error) == "it needs 2001 tokens of cache; m has 2000"
    assert not world.effects(ask.Retried)


def test_a_conversation_that_another_writer_moved_is_read_again_and_spends_no_attempt() -> None:
    world = ready()
    world.hold_answers = {ask.Begin}
    work = world.submit("r", conversation="c")
    (begin,) = world.asked
    world.flow.attempts.log_moved(work.subject, begin.run_id, world.now)
    world.settle()
    assert len(world.effects(ask.Prepare)) == 2
    world.asked.remove(begin)
    world.flow.attempts.log_moved(work.subject, begin.run_id, world.now)  # of a run that is over
    world.release(ask.Begin)
    assert world.started == ["r"]
    world.finish("r")
    assert (world.ended, work.spent) == ([("r", "completed")], 1)


def test_an_answer_that_stands_leaves_the_queue_to_those_behind_it() -> None:
    world = ready()
    world.hold_answers = {ask.Prepare}
    work = world.submit("r", conversation="c")
    world.submit("behind", conversation="c")
    world.flow.attempts.answer_stands(work.subject, work.run.run_id, Finished(), world.now, large=False)
    world.settle()
    world.release(ask.Prepare)
    assert (world.ended, world.started) == ([("r", "completed")], ["behind"])
    assert len(world.flow.scheduler) == 0


def test_a_summary_whose_conversation_was_read_ends_without_reading_it_again() -> None:
    world = ready()
    world.appends = "mark"
    work = world.submit("summary", conversation_id="c", task="summarization")
    world.fail("summary", EngineFailed("it fell over"))
    assert work.stage is Stage.RETRYING
    world.cancel("summary")
    assert world.ended == [("summary", "cancelled")]
    assert not world.effects(ask.CheckForAnswer)


def test_the_next_turn_runs_where_its_conversation_ran() -> None:
    world = ready()
    world.up(replica=1)
    on = {work.request_id: work.run.replica for work in (world.submit("other"), world.submit("turn", conversation="c"))}
    assert sorted(on.values()) == [0, 1]
    world.finish("other")
    world.finish("turn")
    for name in ("second", "third"):
        assert world.submit(name, conversation="c").run.replica == on["turn"]
        world.finish(name)


def test_a_run_that_ends_well_makes_up_for_deaths_of_its_engine() -> None:
    world = ready()
    lane = world.flow.lane("m")
    for number in range(3):
        world.submit(f"r{number}", max_attempts=9)
        world.die()
        world.pass_time(60.0)
        world.up()
    assert lane.deaths > 0
    world.finish(next(iter(world.running)))
    assert lane.deaths == 0


def test_who_has_ended_well_is_no_suspect() -> None:
    world = ready(slots=4)
    works = [world.submit(f"r{number}") for number in range(4)]
    world.die()
    world.pass_time(60.0)
    world.up(slots=4)
    groups = {work.request_id: work.group for work in works}
    assert None not in groups.values()
    name = next(iter(world.running))
    ended = world.running[name]
    world.finish(name)
    assert ended.group is None
    assert ended not in groups[name].members


def test_a_run_whose_engine_had_gone_waits_for_the_next_one_and_is_not_to_blame() -> None:
    world = ready()
    work = world.submit("r")
    world.flow.attempts.not_started(work.subject, work.run.run_id, world.now)
    world.settle()
    assert (work.stage, world.started) == (Stage.QUEUED, ["r"])
    world.running.clear()
    world.die()
    world.up()
    assert (world.started, work.spent, work.deaths) == (["r", "r"], 1, 0)


def test_readers_who_saw_it_run_hear_that_it_is_tried_again_and_waits() -> None:
    world = ready(slots=2, status_linger_s=0.5)
    works = [world.submit("r"), world.submit("other")]
    world.pass_time(1.0)
    world.die()  # under two, so neither has spent an attempt
    world.pass_time(1.0)
    for work in works:
        of_it = [one for one in world.effects(ask.Status) if one.subject.seq == work.number]
        said = [(one.status, one.subject.attempt) for one in of_it]
        assert said == [("running", 1), ("retrying", 1), ("loading_model", 2)]
        assert (work.spent, len(work.history.attempts)) == (1, 1)
