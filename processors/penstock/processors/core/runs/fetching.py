"""Parked requests are read again before their turn comes: which ones, and how many at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.effects import Effect, Fetch
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.topics import CLASSES

FETCH_AHEAD = 256
"""How many parked requests of a class are read again together, when fewer than half as many have their bytes."""


@dataclass(eq=False)
class Fetching:
    """Within the budget's share of each class and model."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _budget: Budget
    _holdings: Holdings
    _emit: Callable[[Effect], None]

    def ahead(self, lane: Lane) -> None:
        """Before their turn comes, while few of their class have their bytes."""
        for klass, parked in lane.parked.items():
            if parked and self._scheduler.fronts.depth(lane.name, klass) - parked < FETCH_AHEAD // 2:
                self.fetch(lane, klass)

    def fetch_one(self, lane: Lane, work: Work) -> None:
        """Have this request's bytes read again, whatever is before it and whatever its class has."""
        self._registry.transition(work, "fetch", Stage.FETCHING)
        lane.parked[work.klass] -= 1
        self._emit(Fetch(work.tp, (work.key[2],), CLASSES.index(work.klass)))

    def fetch(self, lane: Lane, klass: str, first: Work | None = None) -> None:
        """Have the bytes of the first parked requests of a class read again, as many as their share has room for.

        `first` may exceed the share, unless those before it in the queue exceed it already.
        """
        wanted: dict[tuple[str, int], list[int]] = {}
        queue = self._scheduler.fronts.ahead(lane.name, klass, FETCH_AHEAD)
        room, ahead_bytes, share_bytes = self._budget.room(klass, lane.name), 0, self._budget.pair_share_bytes
        exceeds = False
        for work in queue:
            if work.stage is Stage.FETCHING:
                room -= work.size_bytes
            if work.stage is Stage.PARKED:
                room -= work.size_bytes
                if room < 0:
                    if work is not first or ahead_bytes > share_bytes:
                        continue
                    exceeds = True
                self._registry.transition(work, "fetch", Stage.FETCHING)
                lane.parked[klass] -= 1
                wanted.setdefault(work.tp, []).append(work.key[2])
            ahead_bytes += work.size_bytes
        for tp, offsets in wanted.items():
            self._emit(Fetch(tp, tuple(sorted(offsets)), CLASSES.index(klass)))
        if exceeds and first is not None:
            self._park_last(queue, first, ahead_bytes - first.size_bytes - share_bytes)

    def _park_last(self, queue: list[Work], first: Work, excess_bytes: int) -> None:
        """Requests behind `first` give their bytes back, the last one first, until the share has room for the rest."""
        for work in reversed(queue):
            if work is first or excess_bytes <= 0:
                return
            if self._holdings.park(work):
                excess_bytes -= work.size_bytes
