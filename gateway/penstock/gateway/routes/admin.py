"""`/v1/stats` of the caller's tenant, and what operators see of all: `/v1/admin/…`, for the scope `admin`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.paging import page
from penstock.gateway.view.model_events import MOST_EVENTS
from penstock.gateway.view.outputs import json_at_once, json_bytes
from penstock.schemas.errors import InvalidRequest

router = APIRouter(prefix="/v1", tags=["operations"])

MOST_AHEAD_S = 36_500 * 86_400.0


@router.get("/stats", summary="The caller's tenant: what it has under way, its rates and its limits")
async def stats(request: Request) -> dict[str, Any]:
    caller = caller_of(request)
    limits = context_of(request).allowances.limits_of(caller.tenant)
    facts = service_of(request).facts.tenant_stats(caller.tenant)
    return {**facts, "key_id": caller.key_id, "scopes": sorted(caller.scopes), "limits": limits.to_dict()}


@router.get("/waiting", summary="What of the caller's tenant waits, by class and model, and when it will be empty")
async def own_waiting(request: Request) -> Response:
    """The longest lines first, at most 100."""
    facts, tenant = service_of(request).facts, caller_of(request).tenant
    return await _shared(request, lambda: facts.waiting(tenant))


@router.get("/admin/overview", summary="Problems, statistics, devices, what waits and tenants, in one answer")
async def admin_overview(request: Request) -> Response:
    """What the first screen of the console shows, as one call: each part is the answer of the route of its name."""
    parts = _parts(request)
    return await _shared(request, lambda: {"object": "overview", **{name: made() for name, made in parts.items()}})


@router.get("/admin/waiting", summary="What waits, by tenant, class and model, and when it will be empty")
async def admin_waiting(request: Request) -> Response:
    """The longest lines first, at most 100."""
    return await _shared(request, _parts(request)["waiting"])


@router.get("/admin/tenants", summary="What each tenant has under way, its share, and how near it is to its limits")
async def admin_tenants(request: Request) -> Response:
    """Those near a limit first, then the busiest, at most 100."""
    return await _shared(request, _parts(request)["tenants"])


@router.get("/admin/stats", summary="All tenants together: queues, rates, clients, workers, models")
async def admin_stats(request: Request) -> Response:
    return await _shared(request, _parts(request)["stats"])


@router.get("/admin/problems", summary="What is not well now: whom it affects, why, and what mends it")
async def admin_problems(request: Request) -> Response:
    """The gravest first, as of the last second. A problem goes when its cause has gone."""
    return await _shared(request, _parts(request)["problems"])


@router.get("/admin/devices", summary="The devices of all workers and what holds their memory")
async def admin_devices(request: Request) -> Response:
    return await _shared(request, _parts(request)["devices"])


def _parts(request: Request) -> dict[str, Callable[[], dict[str, Any]]]:
    """What makes each part of an overview. Raises as `service_of`."""
    service, context = service_of(request), context_of(request)
    facts, kafka = service.facts, service.kafka
    assert context.problems is not None
    address = {"bootstrap_servers": kafka.bootstrap_servers, "topic_prefix": kafka.topic_prefix}
    return {
        "problems": context.problems.to_json,
        "stats": lambda: {**facts.stats(), "kafka": address},
        "devices": lambda: page(facts.devices()),
        "waiting": lambda: facts.waiting(None),
        "tenants": lambda: facts.tenants(context.allowances.limits_of),
    }


@router.get("/admin/history", summary="The last 48 hours by the minute: what came and ended, queues, times, memory")
async def admin_history(
    request: Request,
    range_s: Annotated[
        int, Query(ge=60, le=172_800, multiple_of=60, description="How far back, in seconds: whole minutes.")
    ] = 3_600,
    step_s: Annotated[
        int, Query(ge=60, le=86_400, multiple_of=60, description="The length of a step, in seconds: whole minutes.")
    ] = 60,
) -> Response:
    """One list for each figure, with a value for each step. All gateways answer the same, since it is made from the
    log. 503 while this gateway catches up."""
    service = service_of(request)
    if (error := context_of(request).awaited()) is not None:
        raise error

    async def make() -> bytes:
        read = service.facts.history(range_s // 60, step_s // 60)
        return await service.threads.lists.run(lambda: json_at_once(read()))

    return await context_of(request).shared.answer(request, caller_of(request), make)


@router.get("/admin/gateways", summary="Gateways, bridges, senders of webhooks and summarizers")
async def admin_gateways(request: Request) -> Response:
    """What each last reported of itself. One that stopped in order is not listed."""
    facts = service_of(request).facts
    return await _shared(request, lambda: page(facts.gateways()))


@router.get("/admin/model-events", summary="Loads, unloads and evictions of models, newest first")
async def admin_model_events(
    request: Request,
    model: Annotated[str | None, Query(description="Only of this model, by its id.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_EVENTS, description="At most so many.")] = 100,
) -> Response:
    """As they follow from the reports of workers that this gateway has read, the last 1,000."""
    facts = service_of(request).facts
    return await _shared(request, lambda: page(facts.model_events(model, limit)))


async def _shared(request: Request, made: Callable[[], dict[str, Any]]) -> Response:
    async def make() -> bytes:
        return json_bytes(made())

    return await context_of(request).shared.answer(request, caller_of(request), make)


@router.post(
    "/admin/artifacts/sweep", summary="Take away expired artifacts, orphans and broken uploads, of all tenants"
)
async def sweep_artifacts(
    request: Request, dry_run: Annotated[bool, Query(description="Only say what would be taken away.")] = False
) -> dict[str, Any]:
    """Gateways do it every `gateway.sweep_artifacts_s` by themselves."""
    swept = await service_of(request).sweeps.sweep(dry_run=dry_run)
    if not dry_run:
        for tenant in {one.tenant for one in swept.doomed}:
            context_of(request).allowances.artifacts.removed(tenant)
    return swept.to_json()


@router.post(
    "/admin/conversations/sweep", summary="Delete the conversations whose retention has run out, of all tenants"
)
async def sweep_conversations(
    request: Request,
    dry_run: Annotated[bool, Query(description="Only say what is due.")] = False,
    within_s: Annotated[
        float, Query(ge=0, le=MOST_AHEAD_S, description="With `dry_run`: what is due in so many seconds, too.")
    ] = 0.0,
) -> dict[str, Any]:
    """Gateways do it every `gateway.sweep_conversations_s` by themselves. The answer says what is due, the first first;
    they go from now on, `gateway.expired_per_minute` at most."""
    if within_s and not dry_run:
        raise InvalidRequest("within_s goes with dry_run: what is not due is not deleted", param="within_s")
    sweeps = service_of(request).conversation_sweeps
    look = await sweeps.look(round(within_s * 1000))
    if not dry_run:
        sweeps.ask()
    return look.to_json(dry_run=dry_run, retention=sweeps.retention)
