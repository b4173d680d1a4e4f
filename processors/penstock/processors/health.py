"""Liveness, readiness by progress and metrics on the worker's own port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import web

from penstock.processors.metrics import Metrics


class HealthServer:
    """`/healthz` answers while the loop turns; `/readyz` is 200 only when `readiness` has no reason against it."""

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        *,
        readiness: Callable[[], list[str]],
        describe: Callable[[], dict[str, Any]],
        refresh: Callable[[], None],
    ) -> None:
        self._host, self._port = host, port
        self._metrics = metrics
        self._readiness = readiness
        self._describe = describe
        self._refresh = refresh
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Raises OSError when the port is taken."""
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics_page)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, shutdown_timeout=1).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", **self._describe()})

    async def _readyz(self, _request: web.Request) -> web.Response:
        reasons = self._readiness()
        return web.json_response(
            {"ready": not reasons, "reasons": reasons, **self._describe()}, status=503 if reasons else 200
        )

    async def _metrics_page(self, _request: web.Request) -> web.Response:
        self._refresh()
        return web.Response(
            body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )
