"""Parked requests are read again before their turn comes: which ones, and how many at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.effects import Effect, Fetch
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.states import Stage
from penstock.processors.core.requests.work import Work
from penstock.schemas.topics import CLASSES

FETCH_AHEAD = 256
"""So many parked requests of a class are read again together, when fewer than half as many have their bytes."""


@dataclass(eq=False)
class Fetching:
    """Within the budget's share of each class and model."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _budget: Budget
    _emit: Callable[[Effect], None]

    def ahead(self, lane: Lane) -> None:
        """Before their turn comes, while few of their class have their bytes."""
        for klass, parked in lane.parked.items():
            if parked and self._scheduler.fronts.depth(lane.name, klass) - parked < FETCH_AHEAD // 2:
                self.fetch(lane, klass, at_least_one=False)

    def fetch_one(self, lane: Lane, work: Work) -> None:
        """Have this request's bytes read again, whatever stands before it and whatever its class has."""
        self._registry.transition(work, "fetch", Stage.FETCHING)
        lane.parked[work.klass] -= 1
        self._emit(Fetch(work.tp, (work.key[2],), CLASSES.index(work.klass)))

    def fetch(self, lane: Lane, klass: str, *, at_least_one: bool) -> None:
        """Have the bytes of the first parked requests of a class read again, as many as their share has room for."""
        wanted: dict[tuple[str, int], list[int]] = {}
        room = self._budget.room(klass, lane.name)
        for work in self._scheduler.fronts.ahead(lane.name, klass, FETCH_AHEAD):
            if work.stage is Stage.FETCHING:
                room -= work.size_bytes
            if work.stage is not Stage.PARKED:
                continue
            room -= work.size_bytes
            if room < 0 and (wanted or not at_least_one):
                break
            self._registry.transition(work, "fetch", Stage.FETCHING)
            lane.parked[klass] -= 1
            wanted.setdefault(work.tp, []).append(work.key[2])
        for tp, offsets in wanted.items():
            self._emit(Fetch(tp, tuple(sorted(offsets)), CLASSES.index(klass)))
