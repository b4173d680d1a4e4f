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
MOST_EMPTY_LINES = 1_000
"""Lines in which nothing waits that are kept for their rates."""
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
    later: Counter[int] = field(default_factory=Counter[int])
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
    reasons: Counter[str] = field(default_factory=Counter[str])
    """What they wait for, as the newest status of each says."""
    came: Rate = field(default_factory=Rate)
    left: Rate = field(default_factory=Rate)

    def empty_in_s(self, now_ms: int) -> float | None:
        """When nothing will wait if requests come and leave as in the last seconds; None if that is never."""
        left_per_s = max(self.left.per_s(now_ms, SHORT_S), self.left.per_s(now_ms))
        net_per_s = left_per_s - self.came.per_s(now_ms, SHORT_S)
        return self.waiting.due(now_ms) / net_per_s if net_per_s > 0 else None


class Lines:
    """The lines in which something waits, and some in which nothing does."""

    def __init__(self) -> None:
        self._lines: dict[LineId, Line] = {}
        self._empty: dict[LineId, None] = {}

    def add(self, line_id: LineId, since_ms: int, count: int, *, later: bool, reason: str | None) -> None:
        """As `WaitCount.add`, of requests that wait for one reason."""
        line = self._lines.get(line_id) or self._new(line_id)
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
        reasons = self._lines[line_id].reasons
        if before is not None:
            add_to(reasons, before, -1)
        if now is not None:
            add_to(reasons, now, 1)

    def moved(self, from_id: LineId | None, to_id: LineId | None, time_ms: int) -> None:
        """A request left one line for another. None is no line."""
        if from_id is not None:
            (self._lines.get(from_id) or self._new(from_id)).left.count(time_ms)
        if to_id is not None:
            (self._lines.get(to_id) or self._new(to_id)).came.count(time_ms)

    def waiting(self, tenant: str | None = None) -> Iterator[tuple[LineId, Line]]:
        """The lines of one tenant, or all, in which something waits."""
        for line_id, line in self._lines.items():
            if line.waiting.requests and tenant in (None, line_id[0]):
                yield line_id, line

    def _new(self, line_id: LineId) -> Line:
        line = self._lines[line_id] = Line()
        self._is_empty(line_id)
        return line

    def _is_empty(self, line_id: LineId) -> None:
        """Nothing waits in it. Of those in which nothing does the oldest is dropped, if there are too many."""
        self._empty[line_id] = None
        if len(self._empty) > MOST_EMPTY_LINES:
            oldest = next(iter(self._empty))
            del self._empty[oldest], self._lines[oldest]


K = TypeVar("K", bound=Hashable)


def add_to(counts: Counter[K], key: K, count: int) -> None:
    """More of a key, or less; what is 0 is not held."""
    counts[key] += count
    if not counts[key]:
        del counts[key]
