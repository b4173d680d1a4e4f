"""Claims of Idempotency-Keys: which content may be submitted under a key that has no request yet. Pure.

A gateway claims a key before it submits a request under it. All claims of a key are on one partition, so that all
gateways agree which is the first.
"""

from __future__ import annotations

from penstock.gateway.view.request_state import Key
from penstock.schemas.records import KeyClaim

CLAIM_MS = 3_600_000
"""A claim without a request counts for so long: its gateway has died, or the broker did not answer it."""
MOST_CLAIMS = 100_000
"""The oldest are forgotten beyond it. A claim is forgotten as soon as its request is known."""


class Claims:
    """The first claim of each key, in the order of the log. Ages are differences of append times."""

    def __init__(self, most: int = MOST_CLAIMS) -> None:
        self._most = most
        self._first: dict[Key, tuple[str, int]] = {}

    def take(self, claim: KeyClaim, append_time_ms: int) -> None:
        """The next claim of its partition."""
        key = (claim.tenant, claim.request_id)
        first = self._first.get(key)
        if first is None or append_time_ms - first[1] >= CLAIM_MS:
            self._first.pop(key, None)
            self._first[key] = (claim.content, append_time_ms)
            while self._is_over(append_time_ms):
                del self._first[next(iter(self._first))]

    def _is_over(self, now_ms: int) -> bool:
        """Whether the oldest can be forgotten. It is kept longer than it counts: partitions are read side by side."""
        return len(self._first) > self._most or now_ms - next(iter(self._first.values()))[1] >= 2 * CLAIM_MS

    def content(self, key: Key) -> str | None:
        """The content that the first claim names; None if no claim is known."""
        first = self._first.get(key)
        return None if first is None else first[0]

    def settle(self, key: Key) -> None:
        """The request is known: its own content counts from now on."""
        self._first.pop(key, None)
