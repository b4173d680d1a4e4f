"""Readiness and metrics: what a probe, a scraper and an operator see, and who is served while the view catches up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from fastapi import FastAPI

from gateway_parts import service_with
from kit.gateway_http import client, gateway_app, gateway_context
from kit.gateway_records import ORIGIN, model_info, model_state, outcome, request, status, worker
from penstock.common.clock import now_ms
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.keys import create_key
from penstock.gateway.metrics import GatewayMetrics, Gauges
from penstock.gateway.routes import health
from penstock.gateway.service.dependencies import Dependencies, Problem
from penstock.gateway.service.facts import Facts
from penstock.gateway.view.follower import Readiness
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.view import View
from penstock.schemas.errors import BrokerUnavailable, Overloaded
from penstock.schemas.records import Timings, Usage

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
    async with client(app, **headers) as http:
        return await http.get(f"/readyz{query}")


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
    names = ("orders", "transactions", "keys")
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
    facts = SimpleNamespace(catching_up=lambda: PROGRESS)
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
    metrics.on_outcome(outcome(usage=usage, timings=timings, model="chat"), "high")
    metrics.on_outcome(outcome(status="dead_lettered"), "low")
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
        "penstock_first_token_seconds_sum 0.04",
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
