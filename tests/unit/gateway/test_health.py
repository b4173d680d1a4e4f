"""Readiness over HTTP: what a probe hears, and what an operator hears beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI

from gateway_parts import edge_of, service_with
from penstock.common.clock import now_ms
from penstock.gateway.context import GatewayContext, put_context
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.edge import install_edge
from penstock.gateway.edge.keys import create_key
from penstock.gateway.routes import health
from penstock.gateway.service.dependencies import Dependencies, Problem
from penstock.gateway.service.facts import Facts
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.view.follower import Readiness
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.records import InferenceRequest, ModelInfo, ModelState, Origin, WorkerState
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import TopicNames

CAUSE = "OSError: no file named model.safetensors"


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[Facts]:
    """Of a worker that could not load its model."""
    yield from facts_of(tmp_path, "failed")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Facts]:
    """Of a worker that serves its model."""
    yield from facts_of(tmp_path, "ready")


def facts_of(tmp_path: Path, state: str) -> Iterator[Facts]:
    store = Store(tmp_path / "view.sqlite", "cluster")
    view, at = View(store, Hub(), TopicNames(), 1), now_ms()
    failed = ModelState(model="chat", state=state, reason="2 loads in a row failed", cause=CAUSE)
    info = ModelInfo(model="chat", tasks=["x"], engine="text", state=state, updated_at=at, worker_id="w")
    view.fleet.models = {("chat", ""): info}
    view.fleet.workers = {
        "w": WorkerState(worker_id="w", state="running", started_at=at, updated_at=at, models=[failed])
    }
    follower: Any = Mock(**{"readiness.return_value": Readiness(ready=True)})
    yield Facts(view, follower, Hub())
    store.close()


def app_of(facts: Facts, policy: AuthPolicy, dependencies: Dependencies | None = None) -> FastAPI:
    context = GatewayContext(settings=GatewaySettings(), policy=policy)
    context.connected = service_with(facts, dependencies=dependencies)
    app = FastAPI()
    put_context(app, context)
    app.include_router(health.router)
    install_edge(app, edge_of(context))
    return app


async def readiness(app: FastAPI, query: str = "", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return await client.get(f"/readyz{query}", headers=headers)


async def reason(facts: Facts, policy: AuthPolicy, **headers: str) -> str:
    answer = await readiness(app_of(facts, policy), **headers)
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    return answer.json()["reason"]


async def test_operators_hear_what_made_a_load_fail_and_probes_do_not(facts: Facts, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secrets = {scope: create_key(keys, tenant="acme", scopes=[scope]) for scope in ("admin", "read")}
    policy = AuthPolicy.build(keys_file=keys)
    public = "chat could not be loaded (2 loads in a row failed)"
    assert await reason(facts, policy) == public
    assert await reason(facts, policy, authorization="Bearer unknown") == public
    assert await reason(facts, policy, authorization=f"Bearer {secrets['read']}") == public
    full = f"chat could not be loaded (2 loads in a row failed: {CAUSE})"
    assert await reason(facts, policy, authorization=f"Bearer {secrets['admin']}") == full


async def test_without_keys_whoever_asks_by_this_machines_name_is_an_operator(facts: Facts) -> None:
    assert CAUSE in await reason(facts, AuthPolicy.build())
    assert CAUSE not in await reason(facts, AuthPolicy.build(), host="rebound.example")


async def tried(**problems: Problem | None) -> Dependencies:
    """Dependencies that were tried once."""

    def probe(problem: Problem | None) -> Any:
        async def result() -> Problem | None:
            return problem

        return result

    made = Dependencies({name: probe(problem) for name, problem in problems.items()}, every_s=60)
    running = asyncio.create_task(made.run())
    while any(one.checked_at_ms is None for one in made.results()):
        await asyncio.sleep(0)
    running.cancel()
    return made


async def test_what_cannot_be_used_is_told_and_keeps_nobody_from_being_served(served: Facts, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    key = create_key(keys, tenant="acme", scopes=["admin"])
    away = await tried(artifacts=Problem("the artifact store cannot be used", "/data: is full"), orders=None)
    app = app_of(served, AuthPolicy.build(keys_file=keys), away)
    public = await readiness(app)
    assert (public.status_code, public.json()["status"]) == (200, "degraded")
    assert public.json()["reason"] == "the artifact store cannot be used"
    assert (await readiness(app, "?require=workers")).status_code == 200, "it is not for want of a worker"
    store, orders = public.json()["dependencies"]
    assert (store["name"], store["ok"], store["reason"]) == ("artifacts", False, public.json()["reason"])
    assert (orders["name"], orders["ok"], orders["reason"]) == ("orders", True, None)
    assert orders["checked_at"].endswith("Z")
    full = (await readiness(app, authorization=f"Bearer {key}")).json()
    assert full["dependencies"][0]["reason"] == full["reason"] == "the artifact store cannot be used: /data: is full"


async def test_what_was_not_tried_yet_is_no_problem(served: Facts) -> None:
    app = app_of(served, AuthPolicy.build(), Dependencies({"artifacts": Mock()}, every_s=60))
    body = (await readiness(app)).json()
    assert body["status"] == "ready"
    assert body["dependencies"] == [{"name": "artifacts", "ok": None, "checked_at": None, "reason": None}]


def waiting(facts: Facts, request_id: str, at_ms: int, *, pool: str | None = None) -> None:
    request = InferenceRequest(
        request_id=request_id, task="x", model="chat", pool=pool, text_generation={}, created_at=at_ms
    )
    view = facts._view
    view.accepted(request, Origin(topic="inference.request.medium", partition=0, offset=0, append_time_ms=at_ms))


async def test_requests_that_wait_for_want_of_a_worker_are_counted(facts: Facts) -> None:
    app, at_ms = app_of(facts, AuthPolicy.build()), now_ms()
    assert (await readiness(app)).json()["waiting_without_worker"] == []
    for number in range(3):
        waiting(facts, f"r{number}", at_ms + number)
    (found,) = (await readiness(app)).json()["waiting_without_worker"]
    assert found == {
        "task": "x",
        "model": "chat",
        "pool": None,
        "requests": 3,
        "since": rfc3339(at_ms),
        "reason": "chat could not be loaded (2 loads in a row failed)",
    }


async def test_a_pool_without_workers_counts_once_somebody_waits_there(served: Facts) -> None:
    app = app_of(served, AuthPolicy.build())
    assert (await readiness(app)).json()["status"] == "ready"
    waiting(served, "r1", now_ms())
    assert (await readiness(app)).json()["status"] == "ready", "a live worker has its model"
    waiting(served, "r2", now_ms(), pool="gpu")
    answer = await readiness(app)
    assert (answer.json()["status"], answer.json()["reason"]) == ("degraded", "no live worker is in the pool gpu")
    (found,) = answer.json()["waiting_without_worker"]
    assert (found["pool"], found["requests"], found["reason"]) == ("gpu", 1, answer.json()["reason"])
    assert (await readiness(app, "?require=workers")).status_code == 503
