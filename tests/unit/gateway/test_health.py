"""Readiness and metrics: what a probe, a scraper and an operator see, and who is served while the view catches up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from gateway_parts import service_with
from kit.gateway_http import call, gateway_app, gateway_context
from kit.records import ORIGIN, model_info, model_state, outcome, request, status, worker
from penstock.common.clock import now_ms
from penstock.common.desired import Desired
from penstock.gateway import connecting
from penstock.gateway.connecting import Connecting
from penstock.gateway.context import context_of_app
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.keys import create_key
from penstock.gateway.metrics import GatewayMetrics, Gauges
from penstock.gateway.routes import health
from penstock.gateway.service.dependencies import Dependencies, Problem
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.model_states import not_following
from penstock.gateway.view.follower import Readiness
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.liveness import judge
from penstock.gateway.view.view import View
from penstock.schemas.errors import BrokerRefused, BrokerUnavailable, InsufficientCapacity, Overloaded
from penstock.schemas.records import DesiredState, ModelInfo, Timings, Usage, WorkerState
from support import wait_until_async

CAUSE = "OSError: no file named model.safetensors"
NOT_LOADED = "chat could not be loaded (2 loads in a row failed)"
PROGRESS = "catching up with the topics: 5 of 9 records"


def site(
    view: View, state: str = "ready", policy: AuthPolicy | None = None, dependencies: Dependencies | None = None
) -> FastAPI:
    """The app of a gateway with one worker, whose model is in this state."""
    at = now_ms()
    view.fleet.models = {("chat", ""): model_info("chat", tasks=["x"], state=state, updated_at=at)}
    models = [model_state("chat", state, reason="2 loads in a row failed", cause=CAUSE)]
    view.fleet.workers = {"w": worker(started_at=at, updated_at=at, models=models)}
    follower: Any = Mock(**{"readiness.return_value": Readiness(ready=True)})
    service = service_with(Facts(view, follower, Hub()), dependencies=dependencies)
    return gateway_app(health.router, service=service, policy=policy)


def waiting(view: View, request_id: str, at_ms: int, **fields: Any) -> None:
    view.accepted(request(request_id, task="x", model="chat", **fields), replace(ORIGIN, append_time_ms=at_ms))


async def readiness(app: FastAPI, query: str = "", **headers: str) -> httpx.Response:
    return await call(app, "GET", f"/readyz{query}", headers=headers)


async def reason(app: FastAPI, **headers: str) -> str:
    answer = await readiness(app, **headers)
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    return answer.json()["reason"]


async def test_operators_see_why_a_load_failed_and_probes_do_not(view: View, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    admin, reader = (create_key(keys, tenant="acme", scopes=[scope]) for scope in ("admin", "read"))
    app, for_operators = site(view, "failed", AuthPolicy.build(keys_file=keys)), f"{NOT_LOADED[:-1]}: {CAUSE})"
    assert await reason(app) == NOT_LOADED
    for key, told in (("unknown", NOT_LOADED), (reader, NOT_LOADED), (admin, for_operators)):
        assert await reason(app, authorization=f"Bearer {key}") == told
    without_keys = site(view, "failed")
    for host, told in (("127.0.0.1", for_operators), ("rebound.example", NOT_LOADED)):
        assert await reason(without_keys, host=host) == told


async def test_operators_see_why_brokers_refuse_the_gateway_and_probes_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.json"
    key = create_key(keys, tenant="acme", scopes=["admin"])
    app = gateway_app(health.router, policy=AuthPolicy.build(keys_file=keys))
    refused = BrokerRefused('Kafka at kafka:9093 refuses this client; check kafka.security."sasl.password"')
    monkeypatch.setattr(connecting.admin, "partition_counts", Mock(side_effect=refused))
    context = context_of_app(app)
    running = asyncio.create_task(Connecting(context).until_connected())
    await wait_until_async(lambda: context.waits_for.cause is not None, 10)
    running.cancel()
    assert (await readiness(app)).json()["reason"] == BrokerRefused.PUBLIC
    assert refused.message in (await readiness(app, authorization=f"Bearer {key}")).json()["reason"]
    assert context.awaited().message.endswith(BrokerRefused.PUBLIC)


async def test_a_gateway_that_stops_is_not_ready(view: View) -> None:
    app = site(view)
    context_of_app(app).draining = True
    answer = await readiness(app)
    assert (answer.status_code, answer.json()["reason"]) == (503, "this gateway stops")


async def test_files_that_differ_between_workers_are_reported(view: View) -> None:
    app = site(view)
    view.fleet.workers["v"] = replace(view.fleet.workers["w"], worker_id="v", models=[])
    assert await reason(app) == "the model chat is missing on v"
    assert (await readiness(app)).json()["file_differences"] == ["the model chat is missing on v"]
    assert (await readiness(app, "?require=workers")).status_code == 200, "no worker is missing"


async def tried(**problems: Problem | None) -> Dependencies:
    """Dependencies that were tried once."""
    probes: Any = {name: AsyncMock(return_value=problem) for name, problem in problems.items()}
    made = Dependencies(probes, every_s=60)
    running = asyncio.create_task(made.run())
    while any(one.checked_at_ms is None for one in made.results()):
        await asyncio.sleep(0)
    running.cancel()
    return made


async def test_a_dependency_that_fails_is_reported_and_calls_are_still_served(view: View, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = create_key(keys, tenant="acme", scopes=["admin"])
    away = await tried(artifacts=Problem("the artifact store cannot be used", "/data: is full"), orders=None)
    app = site(view, policy=AuthPolicy.build(keys_file=keys), dependencies=away)
    assert await reason(app) == "the artifact store cannot be used"
    assert (await readiness(app, "?require=workers")).status_code == 200, "no worker is missing"
    shown = (await readiness(app)).json()["dependencies"]
    names = ("orders", "transactions", "usage", "keys")
    expected = [("artifacts", False, "the artifact store cannot be used"), *((name, True, None) for name in names)]
    assert [(one["name"], one["ok"], one["reason"]) for one in shown] == expected
    assert shown[1]["checked_at"].endswith("Z")
    full = (await readiness(app, authorization=f"Bearer {key}")).json()
    assert full["dependencies"][0]["reason"] == full["reason"] == "the artifact store cannot be used: /data: is full"
    untried = (await readiness(site(view, dependencies=Dependencies({"artifacts": Mock()}, every_s=60)))).json()
    assert untried["status"] == "ready"
    assert untried["dependencies"][:1] == [{"name": "artifacts", "ok": None, "checked_at": None, "reason": None}]


async def test_a_pool_without_workers_counts_once_a_request_waits_there(view: View) -> None:
    app = site(view)
    assert (await readiness(app)).json()["status"] == "ready"
    waiting(view, "r1", now_ms())
    assert (await readiness(app)).json()["status"] == "ready", "a live worker has its model"
    waiting(view, "r2", now_ms(), pool="gpu")
    assert await reason(app) == "no live worker is in the pool gpu"
    (found,) = (await readiness(app)).json()["waiting_without_worker"]
    assert (found["pool"], found["requests"], found["reason"]) == ("gpu", 1, "no live worker is in the pool gpu")
    assert (await readiness(app, "?require=workers")).status_code == 503


@pytest.mark.parametrize("scope", ["read", "submit", "cancel", None])
def test_callers_wait_until_the_view_has_caught_up_and_operators_do_not(scope: str | None) -> None:
    context = gateway_context()
    assert isinstance(context.awaited(scope), BrokerUnavailable)
    facts = SimpleNamespace(catching_up=lambda: PROGRESS, history_until_ms=lambda: None)
    context.connected = service_with(facts)
    refused = context.awaited(scope)
    assert isinstance(refused, Overloaded)
    assert (PROGRESS in refused.message, refused.retry_after_s) == (True, 1)
    assert context.awaited("admin") is None
    facts.catching_up = lambda: None
    assert context.awaited(scope) is None


# -- metrics


def lines_of(metrics: GatewayMetrics) -> list[str]:
    return metrics.render().decode().splitlines()


def test_outcomes_are_counted() -> None:
    metrics = GatewayMetrics()
    usage = Usage(prompt_tokens=7, completion_tokens=5, total_tokens=12)
    timings = Timings(queued_ms=100, admission_ms=20, load_ms=30, run_ms=2000, first_token_ms=40)
    metrics.outcomes.count(outcome(usage=usage, timings=timings, model="chat"), "high")
    metrics.outcomes.count(outcome(status="dead_lettered"), "low")
    metrics.on_status(status("retrying"))
    metrics.on_status(status("running"))
    assert {
        'penstock_requests_total{outcome="completed",task="text_generation"} 1.0',
        'penstock_requests_total{outcome="dead_lettered",task="text_generation"} 1.0',
        'penstock_tokens_total{kind="prompt"} 7.0',
        'penstock_tokens_total{kind="completion"} 5.0',
        "penstock_retries_total 1.0",
        "penstock_dlq_total 1.0",
        'penstock_wait_seconds_sum{class="high",model="chat",task="text_generation"} 0.15',
        'penstock_run_seconds_sum{model="chat",task="text_generation"} 2.0',
        'penstock_first_token_seconds_sum{model="chat"} 0.04',
        'penstock_token_gap_seconds_sum{model="chat"} 0.5275',
        'penstock_model_requests_total{model="chat",outcome="completed"} 1.0',
        'penstock_model_tokens_total{kind="completion",model="chat"} 5.0',
        'penstock_tenant_requests_total{outcome="completed",tenant="default"} 1.0',
        'penstock_tenant_tokens_total{kind="prompt",tenant="default"} 7.0',
        'penstock_tenant_wait_seconds_sum{tenant="default"} 0.15',
    } <= {*lines_of(metrics)}


def test_batches_and_their_lines() -> None:
    metrics = GatewayMetrics()
    metrics.read_batches = lambda: {"": 2, "paused": 1}
    metrics.on_batch_line(completed=True)
    assert {
        'penstock_batches{waiting_for=""} 2.0',
        'penstock_batches{waiting_for="paused"} 1.0',
        'penstock_batch_lines_total{result="completed"} 1.0',
        'penstock_batch_lines_total{result="failed"} 0.0',
    } <= {*lines_of(metrics)}


def test_gauges_and_records_of_the_view_are_read_when_scraped() -> None:
    state = [Gauges()]
    metrics = GatewayMetrics(lambda: state[0])
    assert "penstock_inflight 0.0" in lines_of(metrics)
    assert b"penstock_view_records_total{" not in metrics.render(), "there is no view yet"
    metrics.read_records = lambda: {"decoded": 2, "passed_over": 40}
    state[0] = Gauges(queue_depth={"low": 4}, oldest_age_s={"low": 2.5}, inflight=6, ws_clients=2)
    assert {
        'penstock_view_records_total{fate="passed_over"} 40.0',
        'penstock_queue_depth{class="low"} 4.0',
        'penstock_oldest_age_seconds{class="low"} 2.5',
        "penstock_inflight 6.0",
        "penstock_ws_clients 2.0",
    } <= {*lines_of(metrics)}


# -- what is without a worker


NOW, LATE = 100_000, 20_000


def model(name: str, pool: str | None = None, *, task: str = "text_generation") -> ModelInfo:
    return model_info(name, tasks=[task], aliases=["default"], pool=pool)


def serving(*models: str, heard: int = NOW, lost: tuple[str, ...] = (), **fields: Any) -> WorkerState:
    states = [
        model_state(one, "failed", reason="it is too large") if one in lost else model_state(one) for one in models
    ]
    return worker(**{"updated_at": heard, "models": states, **fields})


@pytest.mark.parametrize(
    ("workers", "without", "reason"),
    [
        ([serving("a", "b")], [], None),
        ([serving("a"), serving("b")], [], None),
        ([], ["a", "b"], "no worker is alive"),
        ([serving("a", "b", heard=NOW - LATE - 1)], ["a", "b"], "no worker is alive: w stopped reporting"),
        ([serving("a", "b", heard=NOW - LATE - 1, state="stopped")], ["a", "b"], "no worker is alive"),
        ([serving("a", "b", heard=NOW - LATE)], [], None),
        ([serving("a", "b", state="starting")], ["a", "b"], "no worker is alive"),
        ([serving("a", "b", state="stopping")], ["a", "b"], "no worker is alive"),
        ([serving("a")], ["b"], "no live worker has b"),
        ([serving("a", "b", lost=("a",))], ["a"], "a could not be loaded (it is too large)"),
        ([serving("a", "b", pool="p"), serving()], ["a", "b"], "no live worker has a, b"),
        ([serving("a", lost=("a",))], ["a", "b"], "no live worker has b; a could not be loaded (it is too large)"),
        ([serving("a", lost=("a",)), serving("a", "b")], [], None),
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
    assert judge([serving("a", "b", lost=("b",))], models, NOW, LATE).awaits_worker(task, name, pool) == awaited


def test_requests_of_a_pool_without_live_workers_wait_for_a_worker() -> None:
    judged = judge([serving("a", pool="p")], [model("a", "p")], NOW, LATE)
    assert judged.awaits_worker("text_generation", None, "p") is None
    assert judged.awaits_worker("text_generation", None, None) == "no live worker is in the common pool"
    assert judge([], [], NOW, LATE).awaits_worker("embedding", None, None) == "no worker is alive"


@given(st.lists(st.tuples(st.sampled_from(["running", "starting"]), st.integers(0, 2 * LATE), st.booleans())))
def test_it_is_degraded_exactly_when_a_model_is_without_a_worker(facts: list[tuple[str, int, bool]]) -> None:
    workers = [serving("a", state=state, heard=NOW - ago, lost=("a",) if lost else ()) for state, ago, lost in facts]
    judged = judge(workers, [model("a")], NOW, LATE)
    served = any(state == "running" and ago <= LATE and not lost for state, ago, lost in facts)
    assert (judged.degraded is None) == served == (judged.names_without_worker == [])


@given(st.permutations("abc"), st.integers(0, 3))
def test_a_model_is_too_large_if_all_its_workers_say_so_in_whatever_order(names: list[str], too_large: int) -> None:
    def says(name: str) -> WorkerState:
        code = InsufficientCapacity.code if name in "abc"[:too_large] else "engine_failed"
        return worker(name, model_state("a", "failed", code=code, reason=f"{code} on {name}"), updated_at=NOW)

    judged = judge([says(name) for name in names], [model("a")], NOW, LATE)
    of, code = ("a", None), InsufficientCapacity.code if too_large == 3 else "engine_failed"
    assert (judged.codes[of], judged.lost[of]) == (code, f"{code} on c")


def differs(*workers: WorkerState) -> tuple[str, ...]:
    return judge(workers, [], NOW, LATE).file_differences


def test_where_the_files_of_live_workers_of_a_pool_differ() -> None:
    both, one = serving("a", "b", worker_id="w1"), serving("a", worker_id="w2")
    assert differs(both, one) == ("the model b is missing on w2",)
    assert differs(both, replace(one, pool="p")) == (), "another pool"
    assert differs(both, replace(one, updated_at=NOW - LATE - 1)) == (), "a worker that is late"
    assert differs(both, replace(one, observed_revision=3)) == (), "an order is on its way"
    first, second, older = (
        serving(worker_id=name, models=[model_state("a", entry=entry)])
        for name, entry in (("w1", "x"), ("w2", "y"), ("w3", None))
    )
    assert differs(first, second, older) == ("the model a is configured differently on w1 and w2",)
    assert differs(first, replace(second, models=first.models), older) == ()


# -- dependencies of a gateway


class Stage:
    """Probes by name, whose next results a test sets; each waits until it may go on."""

    def __init__(self, *names: str) -> None:
        self.results: dict[str, Problem | Exception | None] = dict.fromkeys(names)
        self.free = {name: asyncio.Event() for name in names}
        self.begun = dict.fromkeys(names, 0)
        self.dependencies = Dependencies(
            {name: self._probe(name) for name in names}, every_s=0.001, retry_s=0.001, answer_s=0.01
        )

    def _probe(self, name: str) -> Callable[[], Awaitable[Problem | None]]:
        async def probe() -> Problem | None:
            self.begun[name] += 1
            await self.free[name].wait()
            if isinstance(result := self.results[name], Exception):
                raise result
            return result

        return probe

    def problem(self, name: str) -> Problem | None:
        (found,) = [one for one in self.dependencies.results() if one.name == name]
        return found.problem


async def test_the_last_result_of_each_dependency_is_reported() -> None:
    stage = Stage("a", "b")
    found = [(one.name, one.checked_at_ms, one.problem) for one in stage.dependencies.results()]
    assert found == [("a", None, None), ("b", None, None)]
    running = asyncio.create_task(stage.dependencies.run())
    stage.free["a"].set()
    stage.results["a"] = Problem("it is away", "host:port refused")
    await wait_until_async(lambda: stage.problem("a") == Problem("it is away", "host:port refused"))
    stage.results["a"] = None
    await wait_until_async(lambda: stage.problem("a") is None)
    stage.results["a"] = RuntimeError("a defect")
    await wait_until_async(lambda: stage.problem("a") == Problem("the probe of a failed", "RuntimeError: a defect"))
    assert all(one.checked_at_ms is not None for one in stage.dependencies.results() if one.name == "a")
    running.cancel()


async def test_a_hanging_probe_is_reported_once_and_holds_up_no_other() -> None:
    stage = Stage("a", "b")
    running = asyncio.create_task(stage.dependencies.run())
    stage.free["b"].set()
    await wait_until_async(lambda: stage.problem("a") is not None and stage.begun["b"] > 20)
    assert stage.begun["a"] == 1
    assert stage.problem("a") == Problem("the probe of a has no answer within 0.01 s")
    stage.free["a"].set()
    await wait_until_async(lambda: stage.problem("a") is None)
    running.cancel()


def order(created_at: int, revision: int) -> Desired:
    state = DesiredState(kind="model", name=f"m{revision}", action="load", created_at=created_at)
    return Desired(state, revision)


def follows(name: str, observed: int | None, *, topic: str | None = "t", started_at: int = 0) -> WorkerState:
    return worker(name, started_at=started_at, updated_at=NOW, observed_revision=observed, observed_topic_id=topic)


OLD, NEW = NOW - LATE - 1, NOW - LATE


@pytest.mark.parametrize(
    ("orders", "workers", "late"),
    [
        ([], [follows("a", None)], []),
        ([order(OLD, 5)], [follows("a", 5), follows("b", 4), follows("c", None), follows("d", 7)], ["b", "c"]),
        ([order(NEW, 5)], [follows("a", 4)], []),
        ([order(OLD, 5), order(NEW, 9)], [follows("a", 5)], []),
        ([order(OLD, 5)], [follows("a", 5, topic="another")], ["a"]),
        ([order(OLD, 5)], [follows("a", 5, topic=None)], []),
        ([order(OLD, 5)], [follows("a", None, started_at=NEW)], []),
    ],
)
def test_workers_that_do_not_follow_orders(orders: list[Desired], workers: list[WorkerState], late: list[str]) -> None:
    assert not_following(workers, orders, "t", NOW, LATE) == late


@given(st.lists(st.tuples(st.integers(0, NOW), st.integers(0, 20))), st.integers(0, 20))
def test_a_worker_follows_if_it_has_observed_all_orders_that_are_not_new(
    orders: list[tuple[int, int]], observed: int
) -> None:
    late = not_following([follows("a", observed)], [order(*one) for one in orders], "t", NOW, LATE)
    assert late == (["a"] if any(NOW - at > LATE and revision > observed for at, revision in orders) else [])
