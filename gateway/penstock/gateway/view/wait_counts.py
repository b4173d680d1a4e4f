"""Counts of requests that wait, with the age of the oldest and why they wait. Pure; times are passed in."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.gateway.limits.rates import Rate

Kind = tuple[str, str | None, str | None]
"""(task, model that was asked for or chosen, pool)"""
MOST_EMPTY = 50
AGES_MS = 1_000
"""Requests that were accepted within so long of each other are of one age."""
OTHERS: Kind = ("others", None, None)
"""That of a line for requests beyond the most lines."""
MOST_LINES, MOST_OF_TENANT = 2_000, 200
"""Lines of all tenants, and of one: any model may be named on the topics. Shared ones may come on top."""
SHORT_S = 10
"""Rates that a forecast is made from are means of so long, or of a minute if fewer requests left."""


@dataclass(slots=True)
class _Age:
    """Requests of one age."""

    since_ms: int
    """When the first of them was accepted."""
    requests: int = 0


@dataclass(slots=True)
class WaitCount:
    """Requests that wait, by age."""

    requests: int = 0
    ages: dict[int, _Age] = field(default_factory=dict[int, _Age])
    oldest: list[int] = field(default_factory=list[int])
    """A heap of the keys of `ages`."""
    empty: int = 0
    """Ages of which none waits any more."""
    later: Counter[int] = field(default_factory=lambda: Counter())
    """By second since the epoch, those that may not start before."""

    def add(self, since_ms: int, count: int, *, later: bool) -> None:
        """More of them, or less, that wait since then; the time is 0 if it is not known. `later`: they named it."""
        self.requests += count
        if not since_ms:
            return
        number = since_ms // AGES_MS
        if later:
            add_to(self.later, number, count)
        age = self.ages.get(number)
        if age is None:
            age = self.ages[number] = _Age(since_ms)
            heapq.heappush(self.oldest, number)
        elif not age.requests:
            age.since_ms = since_ms
            self.empty -= 1
        elif count > 0:
            age.since_ms = min(age.since_ms, since_ms)
        age.requests += count
        if not age.requests:
            self.empty += 1
            if self.empty > len(self.ages) // 2 + MOST_EMPTY:
                self.ages = {number: age for number, age in self.ages.items() if age.requests}
                self.oldest, self.empty = sorted(self.ages), 0

    def due(self, now_ms: int) -> int:
        """Those that might have started by now."""
        return self.requests - sum(count for number, count in self.later.items() if number > now_ms // AGES_MS)

    @property
    def since_ms(self) -> int | None:
        """Since when the oldest waits, or not a second before that."""
        while self.oldest:
            age = self.ages[self.oldest[0]]
            if age.requests:
                return age.since_ms
            del self.ages[heapq.heappop(self.oldest)]
            self.empty -= 1
        return None


LineId = tuple[str, str, Kind]
"""(tenant, class, kind): requests of one line wait for the same."""


@dataclass(slots=True)
class Line:
    """Requests of one tenant, class and kind that wait."""

    waiting: WaitCount = field(default_factory=WaitCount)
    reasons: Counter[str] = field(default_factory=lambda: Counter())
    """What they wait for, as the newest status of each says."""
    came: Rate = field(default_factory=Rate)
    left: Rate = field(default_factory=Rate)

    def empty_in_s(self, now_ms: int) -> float | None:
        """When nothing will wait if requests come and leave as in the last seconds; None if that is never."""
        left_per_s = max(self.left.per_s(now_ms, SHORT_S), self.left.per_s(now_ms))
        net_per_s = left_per_s - self.came.per_s(now_ms, SHORT_S)
        return self.waiting.due(now_ms) / net_per_s if net_per_s > 0 else None


class Lines:
    """The lines in which something waits, and some in which nothing does, which are kept for their rates.

    Beyond the most lines, requests share one line for their tenant and class, of the kind `OTHERS`. A line is made
    only while nothing of its tenant and class waits in the shared one: so a request leaves the line that it came to.
    """

    def __init__(self, most: int = MOST_LINES, most_of_tenant: int = MOST_OF_TENANT) -> None:
        self._most, self._most_of_tenant = most, most_of_tenant
        self._by_tenant: dict[str, dict[LineId, Line]] = {}
        self._count = 0
        self._empty: dict[LineId, None] = {}
        """Those in which nothing waits, the one that was emptied first before others."""

    def add(self, line_id: LineId, since_ms: int, count: int, *, later: bool, reason: str | None) -> None:
        """As `WaitCount.add`, of requests that wait for one reason."""
        line_id, line = self._of(line_id)
        waiting = line.waiting
        if not waiting.requests:
            self._empty.pop(line_id, None)
        waiting.add(since_ms, count, later=later)
        if reason is not None:
            add_to(line.reasons, reason, count)
        if not waiting.requests:
            self._is_empty(line_id)

    def other_reason(self, line_id: LineId, before: str | None, now: str | None) -> None:
        """A request of the line waits for something else."""
        reasons = self._of(line_id)[1].reasons
        if before is not None:
            add_to(reasons, before, -1)
        if now is not None:
            add_to(reasons, now, 1)

    def moved(self, from_id: LineId | None, to_id: LineId | None, time_ms: int) -> None:
        """A request left one line for another. None is no line."""
        if from_id is not None:
            self._of(from_id)[1].left.count(time_ms)
        if to_id is not None:
            self._of(to_id)[1].came.count(time_ms)

    def waiting(self, tenant: str | None = None) -> Iterator[tuple[LineId, Line]]:
        """The lines of one tenant, or all, in which something waits."""
        for lines in self._by_tenant.values() if tenant is None else (self._by_tenant.get(tenant, {}),):
            for line_id, line in lines.items():
                if line.waiting.requests:
                    yield line_id, line

    def _of(self, line_id: LineId) -> tuple[LineId, Line]:
        """The line in which such requests wait. It is made when it is new."""
        tenant, klass, _ = line_id
        lines, shared_id = self._by_tenant.get(tenant, {}), (tenant, klass, OTHERS)
        if (line := lines.get(line_id)) is not None:
            return line_id, line
        if (shared := lines.get(shared_id)) is not None and shared.waiting.requests:
            return shared_id, shared
        if self._has_room(tenant):
            return line_id, self._new(line_id)
        return shared_id, lines.get(shared_id) or self._new(shared_id)

    def _has_room(self, tenant: str) -> bool:
        """For one more line of the tenant. Empty ones make room: its own if it has as many as it may."""
        lines = self._by_tenant.get(tenant, {})
        while (has_most := len(lines) >= self._most_of_tenant) or self._count >= self._most:
            own_empty = (line_id for line_id, line in lines.items() if not line.waiting.requests)
            empty = next(own_empty if has_most else iter(self._empty), None)
            if empty is None:
                return False
            self._drop(empty)
        return True

    def _new(self, line_id: LineId) -> Line:
        line = self._by_tenant.setdefault(line_id[0], {})[line_id] = Line()
        self._count += 1
        self._empty[line_id] = None
        return line

    def _is_empty(self, line_id: LineId) -> None:
        """Nothing waits in it any more."""
        lines = self._by_tenant[line_id[0]]
        lines[line_id] = lines.pop(line_id)  # behind those that were emptied before
        self._empty[line_id] = None
        while self._count > self._most and self._empty:
            self._drop(next(iter(self._empty)))

    def _drop(self, line_id: LineId) -> None:
        lines = self._by_tenant[line_id[0]]
        del lines[line_id], self._empty[line_id]
        self._count -= 1
        if not lines:
            del self._by_tenant[line_id[0]]


K = TypeVar("K", bound=Hashable)


def add_to(counts: Counter[K], key: K, count: int) -> None:
    """More of a key, or less; what is 0 is not held."""
    counts[key] += count
    if not counts[key]:
        del counts[key]
