"""`/v1/admin/requests`: any tenant's requests for operators, without what callers sent and got."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from penstock.gateway.context import service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes import request_lists
from penstock.gateway.routes.request_filters import queried
from penstock.gateway.service.selection import ALL_TENANTS
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import RequestFilter
from penstock.schemas.ids import check_tenant

router = APIRouter(prefix="/v1/admin/requests", tags=["operations"])


def _shown(entry: Entry, public: Mapping[str, Any]) -> dict[str, Any]:
    return {"tenant": entry.tenant, **request_lists.facts(entry, public)}


@router.get("", summary="A tenant's requests or those of all, or those that changed, without their content")
async def list_requests(
    request: Request,
    where: Annotated[RequestFilter, Depends(queried)],
    asked: Annotated[request_lists.Asked, Depends(request_lists.asked)],
    tenant: Annotated[
        str | None, Query(description="Whose requests; the key's tenant by default, `*` for those of all.")
    ] = None,
) -> Response:
    """With `waiting_for` and `detail`: why each of them waits."""
    named = None if tenant == ALL_TENANTS else check_tenant(tenant or caller_of(request).tenant)
    return await request_lists.answer(request, named, asked, where, show=_shown, show_changed=_shown)


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
