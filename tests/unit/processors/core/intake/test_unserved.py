"""Requests for a model that this worker does not serve: passed on, kept, or ended when nobody serves it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flow_driver import EMBEDDING, HIGH, LOW, MEDIUM, World
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.core.work.states import Stage
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, UnsupportedParameter
from penstock.schemas.records import ModelState, Origin, WorkerState

ABSENT_S = 30.0
SERVING = ModelState(model="n", state="ready", tasks=["text_generation", "embedding"], aliases=["alias"])


class Pool(World):
    """A worker that serves the model `m`, and others that report what they serve."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("m", worker_id="here", model_absent_s=ABSENT_S, **settings)
        self.up()

    def report(
        self, worker: str = "other", *models: ModelState, assigned: tuple[int, ...] = (7,), state: str = "running",
        pool: str | None = None, at_ms: int | None = None,
    ) -> None:  # fmt: skip
        at_ms = self.wall_ms if at_ms is None else at_ms
        places = [f"{topic}/{partition}" for topic in (HIGH, MEDIUM, LOW, EMBEDDING) for partition in assigned]
        self.flow.peers.reported(
            [
                WorkerState(
                    worker_id=worker, state=state, started_at=0, updated_at=at_ms, pool=pool, assigned=places,
                    models=list(models),
                )
            ]
        )  # fmt: skip

    def wait(self, seconds: float, *models: ModelState) -> None:
        """Time passes. This worker reports, and another one too if models are given."""
        until = self.now + seconds
        while self.now < until:
            self.pass_time(min(1.0, until - self.now))
            self.report("here", replace(SERVING, model="m", aliases=[]), assigned=(0,))
            if models:
                self.report("other", *models)

    @property
    def moves(self) -> list[tuple[str, int | None, str | None]]:
        effects = [one for one in self.seen if isinstance(one, ask.Republish)]
        return [(one.subject.request_id, one.partition, one.pool) for one in effects]

    @property
    def passed_on(self) -> list[tuple[str, int | None]]:
        return [(one.subject.request_id, one.partition) for one in self.effects(ask.Republish)]


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.mark.parametrize(("model", "klass"), [("n", MEDIUM), ("alias", LOW), ("n", EMBEDDING)])
def test_a_request_is_passed_on_to_a_worker_that_serves_its_model(pool: Pool, model: str, klass: str) -> None:
    pool.report("other", SERVING, assigned=(3,))
    task = "embedding" if klass == EMBEDDING else "text_generation"
    pool.submit("r", MEDIUM if klass == EMBEDDING else klass, topic=klass, model=model, task=task,
                payload={"input": ["x"]} if klass == EMBEDDING else None)  # fmt: skip
    (passed,) = pool.effects(ask.Republish)
    assert (passed.partition, passed.pool, passed.subject.key[0]) == (3, None, klass)
    assert passed.origin == Origin(topic=klass, partition=0, offset=0, append_time_ms=1_000_000)
    assert (pool.ended, pool.committed(klass)) == ([], 1)


def test_many_requests_are_spread_over_the_partitions_of_all_that_serve_the_model(pool: Pool) -> None:
    pool.report("other", SERVING, assigned=(3, 4))
    pool.report("third", SERVING, assigned=(5,))
    for number in range(40):
        pool.submit(f"r{number}", model="n")
    assert {partition for _, partition in pool.passed_on} == {3, 4, 5}


@pytest.mark.parametrize(
    "report",
    [
        {"state": "draining"},
        {"assigned": ()},
        {"worker": "here"},
        {"at_ms": 1_000_000 - 25_000},
        {"model": "failed"},
    ],
)
def test_a_request_waits_for_a_worker_that_can_take_it(pool: Pool, report: dict[str, Any]) -> None:
    pool.report("here", assigned=(0,))
    fields = dict(report)
    model = replace(SERVING, state=fields.pop("model", "ready"))
    pool.report(fields.pop("worker", "other"), model, **fields)
    work = pool.submit("r", model="n")
    assert (work.stage, pool.passed_on) == (Stage.PARKED, [])
    assert pool.flow.waiting_for(work, pool.now).reason == "no_worker"


def test_a_request_that_waits_is_passed_on_when_a_worker_reports_its_model(pool: Pool) -> None:
    pool.submit("r", model="n")
    pool.wait(3)
    assert pool.passed_on == []
    pool.report("other", SERVING)
    pool.wait(1)
    assert (pool.passed_on, pool.ended, pool.committed()) == ([("r", 7)], [], 1)


IN_ANOTHER_POOL = ("r", None, "another")


@pytest.mark.parametrize(
    ("request_", "passed"),
    [
        ({"model": "n"}, [IN_ANOTHER_POOL]),
        ({"model": "alias", "conversation": "c1"}, [IN_ANOTHER_POOL]),
        ({"model": "n", "names_pool": "own"}, []),
        ({"model": "x"}, []),
        ({"model": None, "task": "embedding"}, []),
        ({"model": "m"}, []),
    ],
)
@pytest.mark.parametrize("reported_at", ["before", "while it waits", "while it waits, and it was removed here"])
def test_a_request_that_names_no_pool_is_passed_on_to_that_of_its_model(
    request_: dict[str, Any], passed: list[object], reported_at: str
) -> None:
    pool = Pool(pool="own")
    if reported_at == "before":
        pool.report("other", SERVING, pool="another")
    pool.submit("r", **request_)
    if reported_at != "before":
        assert pool.moves == []
        if "removed" in reported_at:
            pool.flow.peers.removed = {"n", "alias"}
        pool.report("other", SERVING, pool="another")
        pool.wait(1)
    assert pool.moves == passed


def test_a_worker_of_the_own_pool_is_preferred(pool: Pool) -> None:
    pool.report("far", SERVING, pool="another")
    pool.report("near", SERVING, assigned=(3,))
    pool.submit("r", model="n")
    assert pool.moves == [("r", 3, None)]


def test_a_worker_that_changes_its_pool_counts_in_the_new_one(pool: Pool) -> None:
    pool.report("other", SERVING)
    pool.report("other", SERVING, pool="another")
    pool.submit("r", model="n")
    assert pool.moves == [IN_ANOTHER_POOL]
    pool.report("other", SERVING, pool="another", state="stopped")
    pool.submit("later", model="n")
    assert pool.moves == [IN_ANOTHER_POOL]


def test_turns_move_to_another_pool_in_their_order(pool: Pool) -> None:
    """Also one that comes when its pool is known already, and whose bytes are read sooner."""
    pool.submit("first", model="n", conversation="c1")
    pool.hold_answers |= {ask.Fetch, ask.Republish}
    pool.report("other", SERVING, pool="another")
    pool.submit("second", model="n", conversation="c1")
    pool.submit("third", model="m", conversation="c1")
    pool.wait(2)
    assert pool.moves == []
    pool.release(ask.Fetch)
    pool.wait(2)
    assert pool.moves == [("first", None, "another")]
    pool.release(ask.Republish)
    pool.hold_answers |= {ask.Republish}
    pool.wait(2)
    assert pool.moves == [("first", None, "another"), ("second", None, "another")]
    assert pool.started == []
    pool.release(ask.Republish)
    assert pool.started == ["third"]


def test_nobody_waits_for_a_model_that_an_operator_has_removed(pool: Pool) -> None:
    """A worker that had restarted since kept its requests for a minute."""
    pool.submit("before", model="n")
    pool.flow.peers.removed = {"n"}
    pool.wait(1)
    pool.submit("after", model="n")
    assert sorted(pool.ended) == [("after", "failed"), ("before", "failed")]


def test_a_turn_stays_where_its_conversation_is(pool: Pool) -> None:
    """Also the turns behind it, whatever their models; other conversations go on."""
    pool.report("other", SERVING)
    first = pool.submit("first", model="n", conversation="c1")
    second = pool.submit("second", model="m", conversation="c1")
    pool.submit("else", model="m", conversation="c2")
    pool.wait(2 * ABSENT_S, SERVING)
    assert (pool.passed_on, pool.started, pool.ended) == ([], ["else"], [])
    assert pool.flow.waiting_for(first, pool.now).reason == "no_worker"
    assert pool.flow.waiting_for(second, pool.now).reason == "conversation"
    pool.finish("else")
    pool.models.names = ("m", "n")
    pool.up("n")
    pool.wait(1, SERVING)
    assert pool.started == ["else", "first"]
    pool.finish("first")
    assert pool.started == ["else", "first", "second"]


def test_a_request_fails_only_when_nobody_has_served_its_model_for_a_while(pool: Pool) -> None:
    pool.submit("r", model="n")
    pool.wait(ABSENT_S - 2)
    pool.report("other", SERVING, assigned=())
    pool.wait(1)
    pool.wait(ABSENT_S + 10)
    assert pool.ended == []
    pool.wait(20)
    assert pool.ended == [("r", "failed")]
    (outcome,) = pool.effects(ask.Terminal)
    assert outcome.error.code == "model_not_found"


def test_nothing_is_judged_absent_while_no_report_is_heard(pool: Pool) -> None:
    """Kafka may be away: then this worker cannot know what others serve."""
    pool.submit("r", model="n")
    pool.pass_time(10 * ABSENT_S)
    assert pool.ended == []


def test_a_request_waits_from_its_arrival_on_also_if_reports_are_heard_late(pool: Pool) -> None:
    """A worker that hears old reports first, as after a stop, took them for the last sign of the model."""
    pool.report("other", SERVING, assigned=(), at_ms=pool.wall_ms - 1000 * round(ABSENT_S))
    pool.submit("r", model="n")
    pool.pass_time(0.6)
    pool.wait(ABSENT_S - 2)
    assert pool.ended == []
    pool.wait(4)
    assert pool.ended == [("r", "failed")]


def test_a_request_that_was_moved_is_passed_on_by_newer_reports_alone(pool: Pool) -> None:
    """Two workers must not exchange a request for ever."""
    pool.report("other", SERVING)
    first = Origin(topic=MEDIUM, partition=5, offset=9, append_time_ms=pool.wall_ms - 10)
    pool.submit("r", model="n", origin=first)
    pool.wait(3)
    assert pool.passed_on == []
    pool.wait(5, SERVING)
    (passed,) = pool.effects(ask.Republish)
    assert (passed.partition, passed.origin) == (7, first)


def test_a_copy_that_comes_back_before_the_original_is_committed_is_new_work(pool: Pool) -> None:
    """Its partition may be assigned to this worker meanwhile: nobody else has the copy then."""
    pool.hold_answers.add(ask.Republish)
    pool.report("other", SERVING)
    original = pool.submit("r", model="n")
    copy = pool.submit("r", model="n", origin=original.first_place, topic=MEDIUM)
    pool.release(ask.Republish)
    assert (original.stage, copy.stage) == (Stage.DONE, Stage.PARKED)
    assert pool.committed() == 1
    pool.models.names = ("m", "n")
    pool.up("n")
    pool.wait(1)
    assert pool.started == ["r"]


def test_a_cancel_and_a_deadline_end_what_waits(pool: Pool) -> None:
    pool.submit("cancelled", model="n")
    pool.submit("expired", model="n", ttl_ms=1_000)
    pool.cancel("cancelled")
    pool.wait(2)
    assert sorted(pool.ended) == [("cancelled", "cancelled"), ("expired", "expired")]


def test_a_cancel_ends_what_is_read_again_to_be_passed_on(pool: Pool) -> None:
    pool.submit("r", model="n")
    pool.hold_answers.add(ask.Fetch)
    pool.wait(1, SERVING)
    pool.wait(1, SERVING)
    assert pool.asked
    pool.cancel("r")
    pool.release(ask.Fetch)
    assert (pool.ended, pool.passed_on) == ([("r", "cancelled")], [])


def test_an_unsupported_parameter_is_refused_unless_a_live_worker_supports_it(pool: Pool) -> None:
    pool.models.unfit = UnsupportedParameter("n reads no images", param="payload")
    pool.submit("refused", model="x")
    pool.report("other", SERVING)
    pool.submit("passed", model="n")
    assert (pool.ended, pool.passed_on) == ([("refused", "failed")], [("passed", 7)])


def test_a_report_of_an_earlier_release_names_ids_alone(pool: Pool) -> None:
    pool.report("other", ModelState(model="n", state="ready"))
    pool.submit("by-id", model="n")
    pool.submit("by-alias", model="alias")
    assert pool.passed_on == [("by-id", 7)]


CANNOT_LOAD = CannotLoad("its files are missing")


def cannot_load(pool: Pool) -> None:
    """The model `m` dies here, and can never be loaded again."""
    pool.die("m")
    pool.load_failed(CANNOT_LOAD)
    pool.pass_time(1)


@pytest.mark.parametrize(("state", "passes"), [("ready", True), ("absent", True), ("failed", False)])
def test_a_model_that_cannot_be_loaded_here_runs_where_it_is_served(pool: Pool, state: str, passes: bool) -> None:
    """A turn stays with its conversation, what was moved is not moved again, and words of a run may be published:
    these wait while another worker serves the model.
    """
    pool.report("other", ModelState(model="m", state=state, tasks=["text_generation"]))
    moved = Origin(topic=MEDIUM, partition=5, offset=9, append_time_ms=pool.wall_ms - 10)
    pool.submit("runs")
    pool.submit("r")
    pool.submit("turn", conversation="c1")
    pool.submit("moved", origin=moved)
    cannot_load(pool)
    assert pool.passed_on == ([("r", 7)] if passes else [])
    assert dict(pool.ended) == ({} if passes else dict.fromkeys(("runs", "r", "turn", "moved"), "failed"))
    assert pool.committed() == (0 if passes else 4)


LOADED = ModelState(model="m", state="ready", tasks=["text_generation"])


def fail_loads(pool: Pool, seconds: float, *models: ModelState) -> None:
    """Time passes, and each load of the model `m` fails."""
    until = pool.now + seconds
    while pool.now < until:
        loads = len(pool.loads)
        pool.wait(1.0, *models)
        if len(pool.loads) > loads:
            pool.load_failed(CANNOT_LOAD)


def test_a_turn_whose_model_cannot_be_loaded_here_waits_while_another_worker_has_it(pool: Pool) -> None:
    pool.die("m")
    pool.models.names = ("m", "n")
    pool.report("other", LOADED)
    pool.up("n")
    first = pool.submit("first", model="m", conversation="c1")
    second = pool.submit("second", model="n", conversation="c1")
    cannot_load(pool)
    fail_loads(pool, 3 * ABSENT_S, LOADED)
    assert (pool.ended, pool.started, pool.passed_on) == ([], [], [])
    assert pool.flow.waiting_for(first, pool.now).reason == "no_worker"
    assert pool.flow.waiting_for(second, pool.now).reason == "conversation"
    assert len(pool.loads) > 2, "what makes the load fail may be mended"
    pool.up("m")
    pool.wait(1, LOADED)
    assert pool.started == ["first"]
    pool.finish("first")
    assert pool.started == ["first", "second"]


def test_a_turn_asks_for_its_model_again_though_an_operator_had_it_unloaded(pool: Pool) -> None:
    """It is unloaded until somebody asks for it."""
    pool.die("m")
    pool.report("other", LOADED)
    pool.flow.lane("m").desired = False
    pool.submit("turn", conversation="c1")
    cannot_load(pool)
    loads = len(pool.loads)
    pool.wait(40, LOADED)
    assert len(pool.loads) > loads
    pool.up("m")
    pool.wait(1, LOADED)
    assert pool.started == ["turn"]


@pytest.mark.parametrize("state", ["absent", "loading", "failed"])
def test_it_fails_with_the_error_of_the_load_when_nobody_has_had_the_model_for_a_while(pool: Pool, state: str) -> None:
    pool.die("m")
    pool.report("other", LOADED)
    pool.submit("turn", conversation="c1")
    cannot_load(pool)
    fail_loads(pool, ABSENT_S - 2, replace(LOADED, state=state))
    assert pool.ended == []
    fail_loads(pool, 4, replace(LOADED, state=state))
    assert pool.ended == [("turn", "failed")]
    (outcome,) = pool.effects(ask.Terminal)
    assert isinstance(outcome.error, CannotLoad)


def test_a_turn_waits_for_a_worker_that_is_being_restarted(pool: Pool) -> None:
    pool.die("m")
    pool.report("other", LOADED)
    pool.submit("turn", conversation="c1")
    pool.report("other", state="stopped")
    cannot_load(pool)
    fail_loads(pool, ABSENT_S / 2)
    assert pool.ended == []


@pytest.mark.parametrize("reports", [(), (("here", "ready"),), (("other", "failed"),)])
def test_a_failed_load_is_told_at_once_when_no_other_worker_has_the_model(
    pool: Pool, reports: tuple[tuple[str, str], ...]
) -> None:
    for worker, state in reports:
        pool.report(worker, replace(LOADED, state=state))
    pool.submit("runs", conversation="c1")
    pool.submit("turn", conversation="c2")
    cannot_load(pool)
    assert dict(pool.ended) == {"runs": "failed", "turn": "failed"}


def test_a_turn_of_a_model_that_fits_no_device_here_waits_too(pool: Pool) -> None:
    pool.flow.lane("m").never_fits = InsufficientCapacity("it is too large")
    pool.report("other", LOADED)
    turn = pool.submit("turn", conversation="c1")
    pool.submit("r")
    assert pool.flow.waiting_for(turn, pool.now).reason == "no_worker"
    assert (pool.ended, pool.passed_on) == ([], [("r", 7)])


def test_a_turn_that_waits_for_its_next_attempt_waits_on_when_its_model_cannot_be_loaded(pool: Pool) -> None:
    pool.report("other", LOADED)
    turn = pool.submit("turn", conversation="c1")
    behind = pool.submit("urgent", HIGH, conversation="c1")
    pool.fail("turn", EngineFailed("it broke"))
    assert turn.stage is Stage.RETRYING
    cannot_load(pool)
    assert (turn.stage, pool.ended) == (Stage.PARKED, [])
    assert pool.flow.waiting_for(behind, pool.now).reason == "conversation", "it is tried again in its place"
    pool.up("m")
    pool.wait(1, LOADED)
    assert pool.started == ["turn", "turn"]


@pytest.mark.parametrize("stage", [Stage.PARKED, Stage.FETCHING, Stage.QUEUED])
def test_a_request_is_passed_on_from_each_stage_in_which_it_waits_for_its_model(stage: Stage) -> None:
    pool = Pool(intake_bytes=1_200) if stage is Stage.PARKED else Pool()
    pool.report("other", ModelState(model="m", state="ready", tasks=["text_generation"]))
    pool.submit("runs")
    work = pool.submit("r", size=10_000 if stage is Stage.PARKED else 100)
    if stage is Stage.FETCHING:
        pool.hold_answers.add(ask.Fetch)
        assert pool.flow._holdings.park(work)  # pyright: ignore[reportPrivateUsage]
        pool.pass_time(1)
    assert work.stage is stage
    cannot_load(pool)
    if stage is Stage.FETCHING:
        assert pool.flow.waiting_for(work, pool.now).reason == "no_worker"
    pool.release(ask.Fetch)
    pool.settle()
    pool.cancel("runs")
    assert (pool.passed_on, pool.ended, pool.committed()) == ([("r", 7)], [("runs", "cancelled")], 2)


def test_a_repeat_of_a_request_that_is_passed_on_later_has_a_copy_and_no_other_outcome(pool: Pool) -> None:
    """It came since this worker owns the partition: nobody has published under its origin, and it ended silently."""
    pool.flow.registry.owned_since_ms = 0
    pool.report("other", ModelState(model="m", state="ready", tasks=["text_generation"]))
    for name in ("ends", "ends", "passed", "passed"):
        pool.submit(name)
    cannot_load(pool)
    pool.cancel("ends")
    copies = [(one.subject.request_id, one.origin.offset) for one in pool.effects(ask.Republish)]
    assert copies == [("passed", 2), ("passed", 3)]
    assert (pool.ended, pool.committed()) == ([("ends", "cancelled")], 4), "one has begun to run here"
