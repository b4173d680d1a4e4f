"""Readiness over HTTP: what a probe hears, and what an operator hears beside it."""

from __future__ import annotations

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
from penstock.gateway.service.facts import Facts
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.view.follower import Readiness
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.records import ModelInfo, ModelState, WorkerState
from penstock.schemas.topics import TopicNames

CAUSE = "OSError: no file named model.safetensors"


@pytest.fixture
def facts(tmp_path: Path) -> Iterator[Facts]:
    """Of a worker that could not load its model."""
    store = Store(tmp_path / "view.sqlite", "cluster")
    view, at = View(store, Hub(), TopicNames(), 1), now_ms()
    failed = ModelState(model="chat", state="failed", reason="2 loads in a row failed", cause=CAUSE)
    info = ModelInfo(model="chat", tasks=["x"], engine="text", state="failed", updated_at=at, worker_id="w")
    view.fleet.models = {("chat", ""): info}
    view.fleet.workers = {
        "w": WorkerState(worker_id="w", state="running", started_at=at, updated_at=at, models=[failed])
    }
    follower: Any = Mock(**{"readiness.return_value": Readiness(ready=True)})
    yield Facts(view, follower, Hub())
    store.close()


def app_of(facts: Facts, policy: AuthPolicy) -> FastAPI:
    context = GatewayContext(settings=GatewaySettings(), policy=policy)
    context.connected = service_with(facts)
    app = FastAPI()
    put_context(app, context)
    app.include_router(health.router)
    install_edge(app, edge_of(context))
    return app


async def reason(facts: Facts, policy: AuthPolicy, **headers: str) -> str:
    app = app_of(facts, policy)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        answer = await client.get("/readyz", headers=headers)
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
