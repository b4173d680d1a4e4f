"""`/v1/stats` of the caller's tenant, and what operators see of all: `/v1/admin/…`, for the scope `admin`."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.paging import page

router = APIRouter(prefix="/v1", tags=["operations"])


@router.get("/stats", summary="The caller's tenant: what it has under way, its rates and its limits")
async def stats(request: Request) -> dict[str, Any]:
    tenant = caller_of(request).tenant
    limits = context_of(request).allowances.limits_of(tenant)
    return {**service_of(request).facts.tenant_stats(tenant), "limits": limits.to_dict()}


@router.get("/admin/stats", summary="All tenants together: queues, rates, clients, workers, models")
async def admin_stats(request: Request) -> dict[str, Any]:
    return service_of(request).facts.stats()


@router.get("/admin/devices", summary="The devices of all workers and what holds their memory")
async def admin_devices(request: Request) -> dict[str, Any]:
    return page(service_of(request).facts.devices())


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
