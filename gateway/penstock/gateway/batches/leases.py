"""Who runs a batch: the gateway with the highest lease, while that changes. Pure.

No clock is shared: a lease counts as left when the looker has seen it unchanged for LEASE_S by its own clock. Two
gateways may both believe to hold one for a moment. What they do is the same, so that costs work and nothing else.
"""

from __future__ import annotations

from penstock.gateway.batches.keeping import Key, Lease

LEASE_S = 10.0
BEAT_S = 2.0


class Leases:
    """What one gateway has seen of the leases of others."""

    def __init__(self) -> None:
        self._seen: dict[Key, tuple[Lease, float]] = {}

    def to_take(self, key: Key, lease: Lease | None, now: float) -> int | None:
        """The number of the lease to make for a batch; None while somebody runs it. `now` in seconds."""
        if lease is None:
            return 1
        if not lease.beat:
            return lease.number + 1
        seen, since = self._seen.get(key, (None, now))
        if seen != lease:
            self._seen[key] = lease, now
            return None
        return lease.number + 1 if now - since >= LEASE_S else None

    def keep_only(self, keys: set[Key]) -> None:
        """The batches that are open now; others are forgotten."""
        self._seen = {key: seen for key, seen in self._seen.items() if key in keys}
