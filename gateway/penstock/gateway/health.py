"""Liveness, readiness and metrics over HTTP."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from penstock.gateway.follower import Readiness
from penstock.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from penstock.gateway.service import GatewayService

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="Caught up at start, and moving whenever there is lag", response_model=None)
async def readyz(request: Request) -> Response:
    service: GatewayService | None = getattr(request.app.state, "service", None)
    readiness = Readiness(False, request.app.state.connecting.reason) if service is None else service.readiness()
    body: dict[str, Any] = {"status": "ready" if readiness.ready else "not_ready", "reason": readiness.reason}
    return JSONResponse(body, 200 if readiness.ready else 503)


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    found: GatewayMetrics = request.app.state.metrics
    return Response(found.render(), headers={"content-type": CONTENT_TYPE})
