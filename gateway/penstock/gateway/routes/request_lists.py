"""Lists of requests, a tenant's own and those of any tenant: pages, and what has changed since an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from penstock.gateway.context import context_of, service_of
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.paging import After, Limit, Order, Part, number, read_part
from penstock.gateway.routes.paging import page as paged
from penstock.gateway.service.service import GatewayService
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import ALL, RequestFilter
from penstock.gateway.view.outputs import json_bytes
from penstock.gateway.view.request_state import Key
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.labels import Labels

FACTS = {
    "object", "request_id", "task", "status", "done", "attempt", "priority", "model", "pool", "conversation_id",
    "position", "detail", "waiting_for", "model_reason", "worker_id", "device", "status_at", "first_token_at", "ttl_ms",
    "created_at", "start_after", "finished_at", "timings", "error", "redriven_from", "history", "history_dropped",
    *Labels._fields,
}  # fmt: skip
"""Where a request stands and why it failed, not what is in it."""

Json = dict[str, Any]
Show = Callable[[Entry, Mapping[str, Any]], Json]


def facts(_: Entry, public: Mapping[str, Any]) -> Json:
    """A request without what its caller sent and got."""
    return {name: value for name, value in public.items() if name in FACTS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One page of a list, or what has changed since an answer."""

    after: str | None
    limit: int
    order: Order
    changed_since: str | None


def asked(
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
    changed_since: Annotated[
        str | None,
        Query(description="The `cursor` of an answer: the requests that changed behind it, without their content."),
    ] = None,
) -> Asked:
    """Of a query string. Raises InvalidRequest."""
    if changed_since is not None and after is not None:
        raise InvalidRequest("after goes with pages: continue with the cursor of the last answer", param="after")
    return Asked(after=after, limit=limit, order=order, changed_since=changed_since)


async def answer(
    request: Request,
    tenant: str | None,
    asked: Asked,
    where: RequestFilter,
    *,
    reached: RequestFilter = ALL,
    show: Show,
    show_changed: Show,
) -> Response:
    """A page, or changes, of a tenant or of all. `reached` matches what the caller may see; `show` and `show_changed`
    make an item of it.

    Raises as `Lookups.page`.
    """
    service = service_of(request)

    async def make() -> bytes:
        if asked.changed_since is None:
            return json_bytes(await _page(service, tenant, asked, where, show))
        return json_bytes(await _changes(service, tenant, asked, where, reached, show_changed))

    return await context_of(request).shared.answer(request, caller_of(request), make)


async def _page(service: GatewayService, tenant: str | None, asked: Asked, where: RequestFilter, show: Show) -> Json:
    async def read(after: str | None, limit: int, newest_first: bool) -> list[Entry]:
        behind = None if after is None else _key(after, tenant)
        return await service.lookups.page(tenant, limit=limit, after=behind, newest_first=newest_first, where=where)

    cursor = service.lookups.changes_cursor()
    part: Part[Entry] = await read_part(
        read, lambda entry: number(entry.listed_ms), asked.after, asked.limit, asked.order
    )
    ids = [_id(entry.key, tenant) for entry in part.items]
    return {**part.page(_shown(service, part.items, show), ids), "cursor": cursor}


async def _changes(
    service: GatewayService, tenant: str | None, asked: Asked, where: RequestFilter, reached: RequestFilter, show: Show
) -> Json:
    found = await service.lookups.changes(tenant, asked.changed_since or "", where, reached, asked.limit)
    if found is None:
        return {**paged([]), "cursor": None, "left": [], "reset": True}
    ids = [_id(entry.key, tenant) for entry in found.entries]
    made = paged(_shown(service, found.entries, show), has_more=found.has_more, ids=ids)
    left = [_id(key, tenant) for key in found.left]
    return {**made, "cursor": found.cursor, "left": left, "reset": False}


def _id(key: Key, tenant: str | None) -> str:
    """Of a request in a list: `TENANT/REQUEST_ID` in one of all tenants."""
    return key[1] if tenant is not None else "/".join(key)


def _key(item_id: str, tenant: str | None) -> Key:
    """Raises InvalidRequest for an id that no list of all tenants has."""
    if tenant is not None:
        return tenant, item_id
    named, slash, request_id = item_id.partition("/")
    if not slash:
        raise InvalidRequest("after must be TENANT/REQUEST_ID, as last_id has it, in a list of all", param="after")
    return named, request_id


def _shown(service: GatewayService, entries: Any, show: Show) -> list[Json]:
    return [show(*pair) for pair in zip(entries, service.facts.requests(entries), strict=True)]
