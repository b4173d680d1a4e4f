"""What is reported of models and classes. Reads, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.work import Work
from penstock.schemas.topics import CLASSES


@dataclass(eq=False)
class FleetFacts:
    """For reports."""

    _scheduler: Scheduler[Work]
    _lanes: Lanes

    def paused(self) -> list[str]:
        """Classes and models of which nothing new starts."""
        classes = [f"class/{klass}" for klass in CLASSES if klass in self._scheduler.fronts.paused]
        return classes + [f"model/{lane.name}" for lane in self._lanes.values() if lane.paused]

    def reason_of(self, lane: Lane) -> str | None:
        """Why a model has no replica that takes runs; None when nobody wants one."""
        if lane.never_fits is not None:
            return str(lane.never_fits)
        if lane.failures:
            return "its load failed" if lane.failures == 1 else f"{lane.failures} loads in a row failed"
        if lane.short:
            return "it waits for memory"
        return None
