"""Liveness, readiness and metrics over HTTP."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from penstock.gateway.context import context_of
from penstock.gateway.follower import Readiness
from penstock.gateway.metrics import CONTENT_TYPE

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="Caught up at start, and moving whenever there is lag", response_model=None)
async def readyz(request: Request) -> Response:
    context = context_of(request)
    service = context.connected
    readiness = Readiness(False, context.waits_for) if service is None else service.facts.readiness()
    body: dict[str, Any] = {"status": "ready" if readiness.ready else "not_ready", "reason": readiness.reason}
    return JSONResponse(body, 200 if readiness.ready else 503)


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    return Response(context_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})
