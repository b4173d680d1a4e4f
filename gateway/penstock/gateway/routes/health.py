"""Liveness, readiness and metrics over HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.responses import JSONResponse

from penstock.gateway.context import GatewayContext, context_of
from penstock.gateway.metrics import CONTENT_TYPE
from penstock.gateway.service.dependencies import Problem, Tried
from penstock.gateway.view.census import Waiting
from penstock.schemas.errors import PenstockError
from penstock.schemas.times import rfc3339

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The process answers")
@router.get("/health", summary="The process answers: as other servers call it")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="Caught up at start, and moving whenever there is lag", response_model=None)
async def readyz(
    request: Request,
    require: Annotated[
        Literal["workers"] | None,
        Query(description="`workers`: 503 too while a model has no live worker, or requests wait for one."),
    ] = None,
) -> Response:
    """200 `ready`, or `degraded`: requests are accepted, and some wait for a worker, a dependency cannot be used, the
    files of workers of one pool differ, or the history is not known yet: then unknown ids get 503.

    503 `starting`, `unavailable`: this gateway cannot serve.
    """
    context = context_of(request)
    body, lacks_workers = readiness_of(context, for_operators=_is_operator(context, request))
    serves = body["status"] in ("ready", "degraded")
    return JSONResponse(body, 200 if serves and not (require and lacks_workers) else 503)


@router.get("/metrics", summary="Prometheus metrics")
async def metrics(request: Request) -> Response:
    return Response(context_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


# Load balancers probe with HEAD; the documentation has the GETs.
for path, probe in (("/healthz", healthz), ("/health", healthz), ("/readyz", readyz), ("/metrics", metrics)):
    router.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False, response_model=None)


def _is_operator(context: GatewayContext, request: Request) -> bool:
    """Probes need no key; one that comes with an admin's, or to a gateway without keys, is an operator's."""
    try:
        context.policy.check_host(request.headers.get("host", ""))
        return context.policy.authenticate(request.headers, None).allows("admin")
    except PenstockError:
        return False


def readiness_of(context: GatewayContext, *, for_operators: bool) -> tuple[dict[str, Any], bool]:
    """The body of `/readyz`, and whether requests wait, or would wait, for want of a worker.

    For operators the reasons say what made loads fail, and why a dependency cannot be used.
    """
    service = context.connected
    if context.draining:
        return _body("unavailable", "this gateway stops"), True
    if service is None:
        return _body("starting", _reason(context.waits_for, for_operators=for_operators)), True
    readiness, liveness = service.facts.readiness(), service.facts.liveness()
    waiting = service.facts.waiting_without_worker(liveness)
    pools = sorted({reason for kind, _ in waiting if (reason := liveness.empty_pool(kind.pool)) is not None})
    degraded = liveness.degraded_for_operators if for_operators else liveness.degraded
    without = pools if degraded is None else [degraded, *(pools if liveness.live_workers else ())]
    dependencies = [_dependency_json(one, for_operators=for_operators) for one in context.tried(service)]
    reasons = [*without, *liveness.file_differences, *(one["reason"] for one in dependencies if one["reason"])]
    if not readiness.ready:
        status, reasons = "starting" if readiness.starting else "unavailable", [readiness.reason or ""]
    else:
        reasons += [] if readiness.lacks is None else [readiness.lacks]
        status = "degraded" if reasons else "ready"
    body = _body(
        status,
        "; ".join(reasons) or None,
        models_without_worker=liveness.names_without_worker,
        waiting_without_worker=[_waiting_json(kind, reason) for kind, reason in waiting],
        dependencies=dependencies,
        file_differences=list(liveness.file_differences),
    )
    return body, bool(without)


def _body(status: str, reason: str | None, **lists: list[Any]) -> dict[str, Any]:
    empty = {"models_without_worker": [], "waiting_without_worker": [], "dependencies": [], "file_differences": []}
    return {"status": status, **empty, **lists, "reason": reason}


def _waiting_json(waiting: Waiting, reason: str) -> dict[str, Any]:
    return {
        "task": waiting.task,
        "model": waiting.model,
        "pool": waiting.pool,
        "requests": waiting.requests,
        "since": None if waiting.since_ms is None else rfc3339(waiting.since_ms),
        "reason": reason,
    }


def _reason(problem: Problem, *, for_operators: bool) -> str:
    return f"{problem.text}: {problem.cause}" if for_operators and problem.cause is not None else problem.text


def _dependency_json(tried: Tried, *, for_operators: bool) -> dict[str, Any]:
    checked, problem = tried.checked_at_ms, tried.problem
    return {
        "name": tried.name,
        "ok": None if checked is None else problem is None,
        "checked_at": None if checked is None else rfc3339(checked),
        "reason": None if problem is None else _reason(problem, for_operators=for_operators),
    }
