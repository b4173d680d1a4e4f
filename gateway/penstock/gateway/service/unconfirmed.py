"""Requests that were sent and not acknowledged: their records may stand on their topics all the same. Pure.

A client that hears of a failure sends the same again. The repeat gets the id of the first, so that both are one request
wherever the first arrived.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

KEPT_S = 600.0
"""Longer than stock clients try."""
MOST = 1_000
"""Ids of one caller; beyond them its oldest go."""


class Unconfirmed:
    """By who asked and for what: ids that no acknowledgement came for, each to be taken once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._callers: OrderedDict[Hashable, _OfCaller] = OrderedDict()
        """The newest addition is last."""

    def __bool__(self) -> bool:
        self._forget_callers()
        return bool(self._callers)

    def add(self, caller: Hashable, content: str, request_id: str, kept_s: float = KEPT_S) -> None:
        """Keep it for so long, KEPT_S at most."""
        now = self._clock()
        self._forget_callers()
        of = self._callers.setdefault(caller, _OfCaller())
        self._callers.move_to_end(caller)
        of.added_at = now
        of.add(content, request_id, now + min(kept_s, KEPT_S))

    def take(self, caller: Hashable, content: str) -> str | None:
        """The oldest id of the caller's request with this content; it is not given again."""
        of = self._callers.get(caller)
        found = None if of is None else of.take(content, self._clock())
        if of is not None and not of.known:
            del self._callers[caller]
        return found

    def _forget_callers(self) -> None:
        """Those whose last id is too old."""
        while self._callers:
            caller, of = next(iter(self._callers.items()))
            if self._clock() - of.added_at <= KEPT_S:
                return
            del self._callers[caller]


class _OfCaller:
    """One caller's ids, by age and by content."""

    __slots__ = ("added_at", "by_content", "known")

    def __init__(self) -> None:
        self.added_at = 0.0
        self.known: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """(content, until when) by id, the oldest first."""
        self.by_content: dict[str, deque[str]] = {}

    def add(self, content: str, request_id: str, until: float) -> None:
        self.drop(request_id)
        self.known[request_id] = content, until
        self.by_content.setdefault(content, deque()).append(request_id)
        if len(self.known) > MOST:
            self.drop(next(iter(self.known)))

    def take(self, content: str, now: float) -> str | None:
        for request_id in tuple(self.by_content.get(content, ())):
            _, until = self.known[request_id]
            self.drop(request_id)
            if now <= until:
                return request_id
        return None

    def drop(self, request_id: str) -> None:
        known = self.known.pop(request_id, None)
        if known is None:
            return
        ids = self.by_content[known[0]]
        ids.remove(request_id)  # the first of them but for one that failed again
        if not ids:
            del self.by_content[known[0]]
