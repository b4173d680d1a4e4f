"""`/v1/admin/requests`: any tenant's requests for operators, without what callers sent and got."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from penstock.gateway.context import service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.native import requests_part
from penstock.gateway.routes.paging import After, Limit, Order
from penstock.gateway.routes.request_filters import queried
from penstock.gateway.service.selection import ALL_TENANTS
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import RequestFilter
from penstock.schemas.ids import check_tenant
from penstock.schemas.labels import Labels

router = APIRouter(prefix="/v1/admin/requests", tags=["operations"])

SHOWN = {
    "object", "request_id", "task", "status", "done", "attempt", "priority", "model", "pool", "conversation_id",
    "position", "detail", "waiting_for", "model_reason", "ttl_ms", "created_at", "start_after", "finished_at",
    "timings", "error", "redriven_from", "history", "history_dropped", *Labels._fields,
}  # fmt: skip
"""An operator sees where a request stands and why it failed, not what is in it."""


def _shown(entry: Entry, public: Mapping[str, Any]) -> dict[str, Any]:
    return {"tenant": entry.tenant, **{name: value for name, value in public.items() if name in SHOWN}}


@router.get("", summary="A tenant's requests, without their content")
async def list_requests(
    request: Request,
    where: Annotated[RequestFilter, Depends(queried)],
    tenant: Annotated[str | None, Query(description="Whose requests; the key's tenant by default.")] = None,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
) -> dict[str, Any]:
    """With `waiting_for` and `detail`: why each of them waits."""
    service = service_of(request)
    named = check_tenant(tenant or caller_of(request).tenant)
    part = await requests_part(service, named, where, after, limit, order)
    shown = [_shown(*pair) for pair in zip(part.items, service.facts.requests(part.items), strict=True)]
    return part.page(shown, "request_id")


@router.get("/{request_id}", summary="One request of any tenant, without its content")
async def get_request(
    request: Request,
    request_id: str,
    tenant: Annotated[
        str | None, Query(description="Whose request it is; the key's tenant by default, `*` for any.")
    ] = None,
) -> dict[str, Any]:
    service = service_of(request)
    own = caller_of(request).tenant
    named = await service.lookups.tenant_of(request_id, own) if tenant == ALL_TENANTS else check_tenant(tenant or own)
    entry = await service.lookups.with_outcome(await service.lookups.find(named, request_id))
    return _shown(entry, service.facts.requests([entry])[0])
