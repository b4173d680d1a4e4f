"""What is without a worker: silent workers, workers that start or stop, models that could not be loaded, pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import gateway_records as records
from kit.gateway_records import model_info, model_state
from penstock.gateway.view.liveness import judge
from penstock.schemas.records import ModelInfo, WorkerState

NOW, LATE = 100_000, 20_000


def model(name: str, pool: str | None = None, *, task: str = "text_generation") -> ModelInfo:
    return model_info(name, tasks=[task], aliases=["default"], pool=pool)


def worker(*models: str, heard: int = NOW, lost: tuple[str, ...] = (), **fields: Any) -> WorkerState:
    states = [
        model_state(one, "failed", reason="it is too large") if one in lost else model_state(one) for one in models
    ]
    return records.worker(**{"updated_at": heard, "models": states, **fields})


@pytest.mark.parametrize(
    ("workers", "without", "reason"),
    [
        ([worker("a", "b")], [], None),
        ([worker("a"), worker("b")], [], None),
        ([], ["a", "b"], "no worker is alive"),
        ([worker("a", "b", heard=NOW - LATE - 1)], ["a", "b"], "no worker is alive: w stopped reporting"),
        ([worker("a", "b", heard=NOW - LATE)], [], None),
        ([worker("a", "b", state="starting")], ["a", "b"], "no worker is alive"),
        ([worker("a", "b", state="stopping")], ["a", "b"], "no worker is alive"),
        ([worker("a")], ["b"], "no live worker has b"),
        ([worker("a", "b", lost=("a",))], ["a"], "a could not be loaded (it is too large)"),
        ([worker("a", "b", pool="p"), worker()], ["a", "b"], "no live worker has a, b"),
        ([worker("a", lost=("a",))], ["a", "b"], "no live worker has b; a could not be loaded (it is too large)"),
        ([worker("a", lost=("a",)), worker("a", "b")], [], None),
    ],
)
def test_which_models_have_no_worker(workers: list[WorkerState], without: list[str], reason: str | None) -> None:
    judged = judge(workers, [model("a"), model("b")], NOW, LATE)
    assert judged.names_without_worker == without
    assert judged.degraded == reason


@pytest.mark.parametrize(
    ("task", "name", "pool", "awaited"),
    [
        ("text_generation", None, None, None),
        ("text_generation", "a", None, None),
        ("text_generation", "b", None, "b could not be loaded (it is too large)"),
        ("embedding", "default", None, "no live worker has e"),
        ("text_generation", "unknown", None, None),
        ("text_generation", "a", "q", "no live worker is in the pool q"),
    ],
)
def test_a_request_waits_for_a_worker_of_its_own_model_only(
    task: str, name: str | None, pool: str | None, awaited: str | None
) -> None:
    models = [model("a"), model("b"), model("e", task="embedding")]
    assert judge([worker("a", "b", lost=("b",))], models, NOW, LATE).awaits_worker(task, name, pool) == awaited


def test_requests_of_a_pool_without_live_workers_wait_for_a_worker() -> None:
    judged = judge([worker("a", pool="p")], [model("a", "p")], NOW, LATE)
    assert judged.awaits_worker("text_generation", None, "p") is None
    assert judged.awaits_worker("text_generation", None, None) == "no live worker is in the common pool"
    assert judge([], [], NOW, LATE).awaits_worker("embedding", None, None) == "no worker is alive"


@given(st.lists(st.tuples(st.sampled_from(["running", "starting"]), st.integers(0, 2 * LATE), st.booleans())))
def test_it_is_degraded_exactly_when_a_model_is_without_a_worker(facts: list[tuple[str, int, bool]]) -> None:
    workers = [worker("a", state=state, heard=NOW - ago, lost=("a",) if lost else ()) for state, ago, lost in facts]
    judged = judge(workers, [model("a")], NOW, LATE)
    served = any(state == "running" and ago <= LATE and not lost for state, ago, lost in facts)
    assert (judged.degraded is None) == served == (judged.names_without_worker == [])


def differs(*workers: WorkerState) -> tuple[str, ...]:
    return judge(workers, [], NOW, LATE).file_differences


def test_where_the_files_of_live_workers_of_a_pool_differ() -> None:
    both, one = worker("a", "b", worker_id="w1"), worker("a", worker_id="w2")
    assert differs(both, one) == ("the model b is missing on w2",)
    assert differs(both, replace(one, pool="p")) == (), "another pool"
    assert differs(both, replace(one, updated_at=NOW - LATE - 1)) == (), "a worker that is late"
    assert differs(both, replace(one, observed_revision=3)) == (), "an order is on its way"
    first, second, older = (
        worker(worker_id=name, models=[model_state("a", entry=entry)])
        for name, entry in (("w1", "x"), ("w2", "y"), ("w3", None))
    )
    assert differs(first, second, older) == ("the model a is configured differently on w1 and w2",)
    assert differs(first, replace(second, models=first.models), older) == ()
