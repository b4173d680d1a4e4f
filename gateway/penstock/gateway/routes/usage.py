"""`/v1/usage` of the caller's tenant, and `/v1/admin/usage` of all: what requests used, as JSON pages or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from penstock.common.clock import now_ms
from penstock.gateway.context import context_of, service_of
from penstock.gateway.edge.shared_answers import CSV, JSON, wants_csv
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.paging import After, Limit, Order, page
from penstock.gateway.view.outputs import json_at_once
from penstock.gateway.view.usage import AMOUNTS, OUTCOMES, Amounts, RowKey, day_of
from penstock.schemas.errors import InvalidRequest

router = APIRouter(prefix="/v1", tags=["operations"])

PARTS = {"day": "day", "tenant": "tenant", "model": "model", "key": "key_id"}
"""What usage is grouped by, and the field that names a group."""
BY_DEFAULT, MOST_DAYS = 30, 366
FIGURES = ("requests", *(name for name in AMOUNTS if name != "device_ms"), "device_seconds")

Day = Annotated[str | None, Query(pattern=r"^\d{4}-\d\d-\d\d$", description="A UTC day, YYYY-MM-DD, included.")]
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """`first` and `last` are days, `by` the names of `PARTS`."""

    first: str
    last: str
    by: Sequence[str]
    after: str | None
    limit: int
    newest_first: bool


def asked(
    from_: Annotated[Day, Query(alias="from")] = None,
    to: Day = None,
    group_by: Annotated[
        str, Query(description="Some of day, model, tenant, key, separated by commas; empty for one total.")
    ] = "day,model",
    after: After = None,
    limit: Limit = 100,
    order: Order = "desc",
) -> Asked:
    """Of a query string. The last 30 days by default. Raises InvalidRequest."""
    by = [one.strip() for one in group_by.split(",") if one.strip()]
    if unknown := [one for one in by if one not in PARTS]:
        raise InvalidRequest(f"group_by takes {', '.join(PARTS)}, not {unknown[0]!r}", param="group_by")
    last = _day(to or day_of(now_ms()), "to")
    first = _day(from_, "from") if from_ else last - timedelta(days=BY_DEFAULT - 1)
    if not 0 <= (last - first).days < MOST_DAYS:
        raise InvalidRequest(f"from must be at or before to, and at most {MOST_DAYS} days are shown", param="from")
    return Asked(
        first=first.isoformat(),
        last=last.isoformat(),
        by=[one for one in PARTS if one in by],
        after=after,
        limit=limit,
        newest_first=order == "desc",
    )


def _day(text: str, param: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{param} is no day of the calendar: {text}", param=param) from None


def groups(rows: Iterable[tuple[RowKey, Amounts]], tenant: str | None, by: Sequence[str]) -> list[Json]:
    """The sums of rows of a tenant, or of all, in the order of their ids. Pure."""
    fields = [PARTS[one] for one in by]
    sums: dict[tuple[str, ...], list[int]] = {}
    for key, amounts in rows:
        if tenant is None or key.tenant == tenant:
            group = tuple(getattr(key, field) for field in fields)
            before = sums.get(group)
            sums[group] = [*amounts] if before is None else [*map(int.__add__, before, amounts)]
    return [_shown(fields, group, sums[group]) for group in sorted(sums)]


def _shown(fields: Sequence[str], group: Sequence[str], amounts: Sequence[int]) -> Json:
    *figures, device_ms = amounts
    return {
        "object": "usage",
        "id": "/".join(quote(part, safe="") for part in group) or "all",
        **{field: part or None for field, part in zip(fields, group, strict=True)},
        "requests": sum(figures[: len(OUTCOMES)]),
        **dict(zip(AMOUNTS, figures, strict=False)),
        "device_seconds": device_ms / 1000,
    }


def page_of(found: Sequence[Json], asked: Asked) -> Json:
    """One page. Raises InvalidRequest where `after` names no group."""
    ordered = [*reversed(found)] if asked.newest_first else [*found]
    if asked.after is not None:
        ids = [one["id"] for one in ordered]
        if asked.after not in ids:
            raise InvalidRequest("after is no id of this list", param="after")
        ordered = ordered[ids.index(asked.after) + 1 :]
    return page(ordered[: asked.limit], has_more=len(ordered) > asked.limit)


def csv_of(found: Sequence[Json], asked: Asked) -> bytes:
    """All groups, with a line of names."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*(PARTS[one] for one in asked.by), *FIGURES], extrasaction="ignore")
    writer.writeheader()
    writer.writerows([*reversed(found)] if asked.newest_first else found)
    return text.getvalue().encode()


async def _answer(request: Request, tenant: str | None, asked: Asked) -> Response:
    service = service_of(request)
    read, as_table = service.facts.usage(asked.first, asked.last), wants_csv(request)

    def made() -> bytes:
        found = groups(read(), tenant, asked.by)
        return csv_of(found, asked) if as_table else json_at_once(page_of(found, asked))

    async def make() -> bytes:
        return await service.threads.lists.run(made)

    shared = context_of(request).shared
    return await shared.answer(request, caller_of(request), make, CSV if as_table else JSON)


@router.get("/usage", summary="What the caller's tenant used, by day, model and key")
async def usage(request: Request, asked: Annotated[Asked, Depends(asked)]) -> Response:
    """Requests that ended, their tokens, images and seconds on devices. All gateways answer the same a moment later.
    With `Accept: text/csv` all groups as a table."""
    return await _answer(request, caller_of(request).tenant, asked)


@router.get("/admin/usage", summary="What all tenants used, by day, model, tenant and key")
async def admin_usage(
    request: Request,
    asked: Annotated[Asked, Depends(asked)],
    tenant: Annotated[str | None, Query(description="Only of this tenant.")] = None,
) -> Response:
    """As `/v1/usage`, of all tenants or of one."""
    return await _answer(request, tenant, asked)
