"""Pages of lists of requests, read from the view's file by its indices in the order of acceptance."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.gateway.view.filters import RequestFilter
from penstock.gateway.view.request_state import Key
from penstock.schemas.errors import InvalidRequest

MOST_TENANTS = 2_000
"""Whose requests one page may hold: the file is asked once for each of them."""
_TENANTS = """
WITH RECURSIVE names(tenant) AS (
  SELECT min(tenant) FROM {rows}
  UNION ALL SELECT (SELECT min(tenant) FROM {rows} AND tenant > names.tenant) FROM names WHERE tenant IS NOT NULL)
SELECT tenant FROM names WHERE tenant IS NOT NULL LIMIT ?
"""
_ALL_ROWS, _LIVE_ROWS = "requests WHERE true", "requests INDEXED BY live WHERE done = 0"
Place = tuple[int, str, str, int]
"""(when it was accepted, request_id, tenant): the order of all lists; and the number of the row."""


def tenants(connection: sqlite3.Connection, where: RequestFilter) -> list[str]:
    """All that may have such requests. Raises InvalidRequest when these are too many for a list of all."""
    query = _TENANTS.format(rows=_LIVE_ROWS if where.live_alone else _ALL_ROWS)
    found = [tenant for (tenant,) in connection.execute(query, (MOST_TENANTS + 1,))]
    if len(found) > MOST_TENANTS:
        narrower = "name one" if where.live_alone else "name one, or a status of requests that have not ended"
        raise InvalidRequest(f"a list of all tenants holds {MOST_TENANTS:,} at most: {narrower}", param="tenant")
    return found


def numbers_of_page(
    connection: sqlite3.Connection,
    tenants: Sequence[str],
    *,
    limit: int,
    after: Key | None,
    newest_first: bool,
    where: RequestFilter,
) -> list[int] | None:
    """The rows on one page of these tenants together, in order, behind the request `after`.

    None if that is unknown.
    """
    last: tuple[int, str, str] | None = None
    if after is not None:
        row = connection.execute("SELECT accepted_ms FROM requests WHERE tenant = ? AND request_id = ?", after)
        if (accepted := row.fetchone()) is None:
            return None
        last = (accepted[0], after[1], after[0])
    page: list[Place] = []
    for query, values in _scans(tenants, where):
        behind = "" if last is None else f" AND {_BEHIND[newest_first]}"
        # Of each further tenant and status only what goes before the last on the page so far.
        before = f" AND {_BEHIND[not newest_first]}" if len(page) == limit else ""
        bounds = (*(last or ()), *(page[-1][:3] if before else ()))
        found = connection.execute(f"{query}{behind}{before}{_ORDER[newest_first]}", [*values, *bounds, limit])
        if rows := found.fetchall():
            page = sorted([*page, *rows], reverse=newest_first)[:limit]
    return [number for *_, number in page]


_BEHIND = {newest: f"(accepted_ms, request_id, tenant) {'<' if newest else '>'} (?, ?, ?)" for newest in (True, False)}
_ORDER = {
    newest: f" ORDER BY accepted_ms {order}, request_id {order} LIMIT ?"
    for newest, order in ((True, "DESC"), (False, "ASC"))
}


def _scans(tenants: Sequence[str], where: RequestFilter) -> Iterator[tuple[str, list[Any]]]:
    """Queries of one tenant and status each, which an index answers alone and in order, with their values."""
    conditions = list(where.conditions())
    chosen = "".join(f" AND {condition}" for condition, _ in conditions)
    beside = [value for _, value in conditions]
    query = f"SELECT accepted_ms, request_id, tenant, number FROM requests INDEXED BY {where.index}"
    # SQLite takes a partial index if the query repeats its condition.
    held = " AND status <> 'completed'" if where.index == "by_status" else ""
    for status in where.statuses:
        of_status, named = ("", []) if status is None else (" AND status = ?", [status])
        for tenant in tenants:
            yield f"{query} WHERE tenant = ? AND erased = 0{held}{of_status}{chosen}", [tenant, *named, *beside]
