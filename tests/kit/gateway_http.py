"""A gateway's app without a broker: some of its routes behind its edge, and clients that call it in process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import httpx
from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp

from gateway_parts import edge_of, service_with
from penstock.common.artifacts import ArtifactStore
from penstock.gateway.context import GatewayContext, put_context
from penstock.gateway.document.described_routes import TABLE
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.edge import install_edge
from penstock.gateway.edge.rules import RouteTable
from penstock.gateway.hot_routes import HotRoutes
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.routes import artifacts
from penstock.gateway.service.service import GatewayService
from penstock.gateway.settings import GatewaySettings

Messages = list[dict[str, Any]]
URL = "http://127.0.0.1"


def gateway_context(
    service: GatewayService | None = None, policy: AuthPolicy | None = None, **fields: Any
) -> GatewayContext:
    """`service`: one object stands for each of its parts (`gateway_parts.service_with`). None: Kafka did not answer."""
    fields = {"settings": GatewaySettings(), **fields}
    return GatewayContext(policy=policy or AuthPolicy.build(), connected=service, **fields)


def gateway_app(
    *routers: APIRouter,
    service: GatewayService | None = None,
    policy: AuthPolicy | None = None,
    allowances: Allowances | None = None,
    settings: GatewaySettings | None = None,
    bodies: BodyLimits | None = None,
    routes: RouteTable = TABLE,
    hot: bool = False,
) -> FastAPI:
    context = gateway_context(
        service, policy, allowances=allowances or Allowances(), settings=settings or GatewaySettings()
    )
    app = FastAPI()
    put_context(app, context)
    for router in routers:
        app.include_router(router)
    install_edge(app, edge_of(context, routes, bodies), HotRoutes if hot else None)
    return app


def artifact_app(
    store: ArtifactStore, allowances: Allowances | None = None, policy: AuthPolicy | None = None
) -> FastAPI:
    """The edge and the routes of artifacts."""
    service = service_with(None, artifacts=store)
    bodies = BodyLimits(max_file_bytes=store.max_bytes)
    return gateway_app(artifacts.router, service=service, policy=policy, allowances=allowances, bodies=bodies)


def client(app: ASGIApp, base_url: str = URL, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url, headers=headers)


async def call(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    """The answer to one call."""
    async with client(app) as http:
        return await http.request(method, path, **options)


def scope_of(
    method: str, path: str, headers: Iterable[tuple[bytes, bytes]] = (), query: bytes = b"", **fields: Any
) -> dict[str, Any]:
    """The ASGI scope of an exchange, as uvicorn makes it."""
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "scheme": "http", "root_path": "", "state": {}}
    scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "query_string": query}
    scope |= {"method": method, "path": path, "raw_path": path.encode()}
    return {**scope, "headers": [(b"host", b"127.0.0.1"), *headers], **fields}


async def no_body() -> Any:
    """A receive channel on which nothing arrives."""
    await asyncio.Event().wait()


async def exchange(app: Any, scope: dict[str, Any], receive: Any = no_body) -> Messages:
    """All ASGI messages that the app sends. A cancellation ends the exchange, as at a server that stops."""
    sent: Messages = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        assert current is not None
        current.uncancel()
    return sent
