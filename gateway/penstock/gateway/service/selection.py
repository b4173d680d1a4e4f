"""Which requests that have not ended a command for many is about. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import ALL, RequestFilter

ALL_TENANTS = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Those that `where` matches, of a tenant and an age, or those of a tenant that are named. What is None is any."""

    where: RequestFilter = ALL
    tenant: str | None = None
    """None: the caller's own; `ALL_TENANTS`: of all."""
    older_than_ms: int | None = None
    accepted_before_ms: int | None = None
    ids: Collection[str] | None = None
    """In the order of the call."""

    def meets(self, entry: Entry, now_ms: int) -> bool:
        is_old = self.older_than_ms is None or entry.accepted_ms <= now_ms - self.older_than_ms
        is_old &= self.accepted_before_ms is None or entry.accepted_ms < self.accepted_before_ms
        is_named = self.ids is None or entry.request_id in self.ids
        return is_named and not entry.done and not entry.erased and is_old and self.where.matches(entry)
