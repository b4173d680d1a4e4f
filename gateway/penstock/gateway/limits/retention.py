"""Which conversations are due to be deleted: nobody has touched them for as long as their tenant keeps them. Pure.

Times are in milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Key = tuple[str, str]
"""Tenant and conversation id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """How long conversations are kept without activity, in seconds; 0: for ever."""

    all_s: float = 0.0
    tenants_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of tenants for which another time holds."""

    @property
    def is_on(self) -> bool:
        """Whether it ends conversations of any tenant."""
        return self.all_s > 0 or any(self.tenants_s.values())

    def kept_ms(self, tenant: str) -> int | None:
        """How long the tenant's conversations are kept; None: for ever."""
        kept_s = self.tenants_s.get(tenant, self.all_s)
        return round(kept_s * 1000) if kept_s else None

    def expires_ms(self, tenant: str, active_ms: int | None) -> int | None:
        """When a conversation that was last active then is due; None: never, or its activity is not known."""
        kept_ms = self.kept_ms(tenant)
        return None if kept_ms is None or active_ms is None else active_ms + kept_ms


@dataclass(frozen=True, kw_only=True, slots=True)
class Expiring:
    """A conversation that goes, or will."""

    tenant: str
    conversation_id: str
    last_active_ms: int
    expires_ms: int


def last_active_ms(record_ms: int | None, facts_ms: int | None) -> int | None:
    """The later of the newest record of a conversation and the last change of its facts; None without either."""
    return max((one for one in (record_ms, facts_ms) if one is not None), default=None)


def expiring(active: Mapping[Key, int], retention: Retention, until_ms: int) -> list[Expiring]:
    """Those that are due at `until_ms` if nobody touches them, the first first. `active`: when each was last active."""
    found = [
        Expiring(tenant=key[0], conversation_id=key[1], last_active_ms=active_ms, expires_ms=expires_ms)
        for key, active_ms in active.items()
        if (expires_ms := retention.expires_ms(key[0], active_ms)) is not None and expires_ms <= until_ms
    ]
    return sorted(found, key=lambda one: (one.expires_ms, one.tenant, one.conversation_id))
