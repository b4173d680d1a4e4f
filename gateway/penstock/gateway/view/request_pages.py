"""Pages of lists of requests, read from the view's file by its indices in the order of acceptance."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.gateway.view.filters import RequestFilter
from penstock.gateway.view.request_state import Key

_FIRST_TENANTS = """
WITH RECURSIVE names(tenant) AS (
  SELECT min(tenant) FROM {rows}
  UNION ALL SELECT (SELECT min(tenant) FROM {rows} AND tenant > names.tenant) FROM names WHERE tenant IS NOT NULL)
SELECT requests.tenant FROM names JOIN requests
  ON requests.number = (SELECT number {scan} AND tenant = names.tenant{order} LIMIT 1)
{tenants_order} LIMIT ?
"""
"""The tenants whose first rows come first. A page holds rows of these alone, if they are as many as its rows."""
_ALL_ROWS, _LIVE_ROWS = "requests WHERE true", "requests INDEXED BY live WHERE done = 0"
SortKey = tuple[int, str, str, int]
"""(when it was accepted, request_id, tenant): the order of all lists; and the number of the row."""
_BEHIND = {newest: f" AND (accepted_ms, request_id, tenant) {'<' if newest else '>'} (?, ?, ?)" for newest in (0, 1)}
_ORDER = {newest: f" ORDER BY accepted_ms {word}, request_id {word}" for newest, word in enumerate(("ASC", "DESC"))}
_TENANTS_ORDER = {newest: f"{_ORDER[newest]}, requests.tenant {'DESC' if newest else 'ASC'}" for newest in (0, 1)}


def numbers_of_page(
    connection: sqlite3.Connection,
    tenant: str | None,
    *,
    limit: int,
    after: Key | None,
    newest_first: bool,
    where: RequestFilter,
) -> list[int] | None:
    """The rows on one page of a tenant, or of all tenants, in order, behind the request `after`.

    None if that is unknown.
    """
    last: tuple[int, str, str] | None = None
    if after is not None:
        row = connection.execute("SELECT accepted_ms FROM requests WHERE tenant = ? AND request_id = ?", after)
        if (accepted := row.fetchone()) is None:
            return None
        last = (accepted[0], after[1], after[0])
    page: list[SortKey] = []

    def bounded(scan: str, values: Sequence[Any]) -> tuple[str, list[Any]]:
        """Behind `after`, and before the last on the page so far if it is full."""
        behind = "" if last is None else _BEHIND[newest_first]
        before = _BEHIND[not newest_first] if len(page) == limit else ""
        return scan + behind + before, [*values, *(last or ()), *(page[-1][:3] if before else ())]

    order = _ORDER[newest_first]
    for scan, values in _scans(where):
        tenants = [tenant]
        if tenant is None:
            rows = _LIVE_ROWS if where.live_alone else _ALL_ROWS
            inner, bounds = bounded(scan, values)
            heads = _FIRST_TENANTS.format(
                rows=rows, scan=inner, order=order, tenants_order=_TENANTS_ORDER[newest_first]
            )
            tenants = [found for (found,) in connection.execute(heads, [*bounds, limit])]
        for one in tenants:
            inner, bounds = bounded(scan, values)
            query = f"SELECT accepted_ms, request_id, tenant, number {inner} AND tenant = ?{order} LIMIT ?"
            found = connection.execute(query, [*bounds, one, limit]).fetchall()
            page = sorted([*page, *found], reverse=newest_first)[:limit]
    return [number for *_, number in page]


def _scans(where: RequestFilter) -> Iterator[tuple[str, list[Any]]]:
    """The rows of each status, which an index has alone and in order for one tenant, with the values."""
    conditions = list(where.conditions())
    chosen = "".join(f" AND {condition}" for condition, _ in conditions)
    beside = [value for _, value in conditions]
    # SQLite takes a partial index if the query repeats its condition.
    held = " AND status <> 'completed'" if where.index == "by_status" else ""
    scan = f"FROM requests INDEXED BY {where.index} WHERE erased = 0{held}"
    for status in where.statuses:
        of_status, named = ("", []) if status is None else (" AND status = ?", [status])
        yield f"{scan}{of_status}{chosen}", [*named, *beside]
