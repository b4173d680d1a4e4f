"""What each tenant has under way, its part of what ran in the last minute, and how near it is to its limits. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

from penstock.gateway.limits.limits import Limits
from penstock.gateway.limits.rates import WINDOW_S
from penstock.gateway.limits.tenants import Tenants, TenantWork
from penstock.gateway.view.wait_counts import Lines

MOST_TENANTS = 100
"""Tenants in one answer: those near a limit, and the busiest."""
NEAR = 0.9
"""The part of a limit from which a tenant is near it."""

Json = dict[str, Any]


def tenants_json(tenants: Tenants, lines: Lines, limits_of: Callable[[str], Limits], now_ms: int) -> Json:
    """The tenants that have requests under way, or had some in the last minute.

    Those near a limit come first, then the busiest.
    """
    active = {name: work for name, work in tenants.known().items() if _is_active(work, now_ms)}
    waiting = Counter[str]()
    for (tenant, *_), line in lines.waiting():
        waiting[tenant] += line.waiting.requests
    ended = {name: work.ended.per_s(now_ms) for name, work in active.items()}
    ran = {name: max(0, one.outstanding - waiting[name]) + ended[name] * WINDOW_S for name, one in active.items()}
    all_ran = sum(ran.values())
    used = {name: _used(name, tenants, limits_of(name), now_ms) for name in active}

    def order(name: str) -> tuple[bool, float, int, str]:
        is_near = any(count >= NEAR * limit for count, limit in used[name].values())
        return not is_near, -ran[name], -active[name].outstanding, name

    made: list[Json] = [
        {
            "object": "tenant",
            "tenant": name,
            "outstanding": active[name].outstanding,
            "waiting": waiting[name],
            "share": round(ran[name] / all_ran, 4) if all_ran else 0.0,
            "rates": {
                "accepted_per_s": round(active[name].accepted.per_s(now_ms), 3),
                "ended_per_s": round(ended[name], 3),
            },
            "limits": {one: {"used": count, "limit": limit} for one, (count, limit) in used[name].items()},
        }
        for name in heapq.nsmallest(MOST_TENANTS, active, key=order)
    ]
    return {"object": "tenants", "data": made, "omitted": len(active) - len(made)}


def _is_active(work: TenantWork, now_ms: int) -> bool:
    return work.outstanding > 0 or now_ms - work.heard_ms < WINDOW_S * 1000


def _used(tenant: str, tenants: Tenants, limits: Limits, now_ms: int) -> dict[str, tuple[float, int]]:
    """Of the limits that are counted in the log: (how much is used, the limit)."""
    work = tenants.of(tenant)
    used: dict[str, tuple[float, int]] = {}
    if limits.outstanding is not None:
        used["outstanding"] = (work.outstanding, limits.outstanding)
    if limits.conversations is not None:
        used["conversations"] = (len(work.conversations) + len(work.named), limits.conversations)
    bucket = tenants.tokens(tenant, now_ms / 1000)
    if bucket is not None and limits.tokens_per_minute is not None:
        used["tokens_per_minute"] = (max(0, round(bucket.used(now_ms / 1000))), limits.tokens_per_minute)
    return used
