"""Liveness, readiness and metrics on the own port of a process beside the gateway."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.common.background import BackgroundTasks
from penstock.gateway.metrics import CONTENT_TYPE
from penstock.gateway.server import Server


class Degraded(str):
    """A reason that keeps a process from none of its work."""

    __slots__ = ()


class HealthServer:
    """`/healthz` answers while the loop turns; `/readyz` is 200 while `waits_for` has no reason against it."""

    def __init__(self, host: str, port: int, waits_for: Callable[[], str | None], registry: CollectorRegistry) -> None:
        self._address = (host, port)
        self._waits_for = waits_for
        self._registry = registry
        routes = [
            Route("/healthz", self._healthz),
            Route("/readyz", self._readyz),
            Route("/metrics", self._metrics_page),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = Server(config)
        self._tasks = BackgroundTasks()
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Raises OSError when the port is taken."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listening = socket.create_server(self._address, family=family)
        self._serving = self._tasks.start(self._server.serve([listening]), "health")

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving})

    async def _healthz(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, _request: Request) -> Response:
        reason = self._waits_for()
        status = "ready" if reason is None else "degraded" if isinstance(reason, Degraded) else "unavailable"
        return JSONResponse({"status": status, "reason": reason}, 503 if status == "unavailable" else 200)

    async def _metrics_page(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE})
