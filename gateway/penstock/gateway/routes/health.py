"""Liveness, readiness and metrics over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import JSONResponse

from penstock.gateway.context import GatewayContext, context_of
from penstock.gateway.metrics import CONTENT_TYPE
from penstock.schemas.errors import PenstockError

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="Caught up at start, and moving whenever there is lag", response_model=None)
async def readyz(
    request: Request,
    require: Annotated[
        Literal["workers"] | None, Query(description="`workers`: 503 too while a model has no live worker.")
    ] = None,
) -> Response:
    """200 `ready`, or `degraded`: requests are accepted, and some wait for a worker. 503 `starting`, `unavailable`."""
    context = context_of(request)
    body = readiness_json(context, for_operators=_is_operator(context, request))
    ready = body["status"] == "ready" or (body["status"] == "degraded" and require is None)
    return JSONResponse(body, 200 if ready else 503)


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    return Response(context_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


# Load balancers probe with HEAD; the documentation has the GETs.
for path, probe in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
    router.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False, response_model=None)


def _is_operator(context: GatewayContext, request: Request) -> bool:
    """Probes need no key; one that comes with an admin's, or to a gateway without keys, is an operator's."""
    try:
        context.policy.check_host(request.headers.get("host", ""))
        return context.policy.authenticate(request.headers, None).allows("admin")
    except PenstockError:
        return False


def readiness_json(context: GatewayContext, *, for_operators: bool) -> dict[str, Any]:
    """{status, models_without_worker, reason}; for operators the reason says what made loads fail."""
    service = context.connected
    if service is None:
        return {"status": "starting", "models_without_worker": [], "reason": context.waits_for}
    readiness = service.facts.readiness()
    liveness = service.facts.liveness()
    without = liveness.names_without_worker
    if not readiness.ready:
        status = "starting" if readiness.starting else "unavailable"
        return {"status": status, "models_without_worker": without, "reason": readiness.reason}
    reason = liveness.degraded_for_operators if for_operators else liveness.degraded
    return {"status": "ready" if reason is None else "degraded", "models_without_worker": without, "reason": reason}
