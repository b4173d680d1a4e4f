"""Requests that were sent and not acknowledged: their records may stand on their topics all the same. Pure.

A client that hears of a failure sends the same again. The repeat gets the id of the first, so that both are one request
wherever the first arrived.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

KEPT_S = 600.0
"""Longer than stock clients try."""
MOST = 10_000


class Unconfirmed:
    """By what was asked for: ids that no acknowledgement came for, each to be taken once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """By (tenant, content, request id), the oldest first."""

    def __len__(self) -> int:
        return len(self._since)

    def add(self, tenant: str, content: str, request_id: str) -> None:
        """Keep it for KEPT_S; beyond MOST the oldest goes."""
        self._forget_old()
        self._since[tenant, content, request_id] = self._clock()
        if len(self._since) > MOST:
            self._since.popitem(last=False)

    def take(self, tenant: str, content: str) -> str | None:
        """The oldest id of the tenant's request with this content; it is not given again."""
        self._forget_old()
        found = next((known for known in self._since if known[:2] == (tenant, content)), None)
        if found is None:
            return None
        del self._since[found]
        return found[2]

    def _forget_old(self) -> None:
        while self._since and self._clock() - next(iter(self._since.values())) > KEPT_S:
            self._since.popitem(last=False)
