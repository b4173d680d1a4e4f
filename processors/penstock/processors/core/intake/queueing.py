"""How a request takes its place in the scheduler, with its bytes or without them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.intake.unserved import UnservedRequests
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work


@dataclass(eq=False)
class Queueing:
    """The last one in its class."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _budget: Budget
    _lanes: Lanes
    _holdings: Holdings
    _statuses: Statuses
    _unserved: UnservedRequests
    _dirty: DirtySet

    def join(self, work: Work, event: str, now: float) -> None:
        """`event`: why it comes. Its bytes stay if they are here and its class has room for them."""
        lane = self._lanes[work.lane]
        self._holdings.count(work)
        if (
            work.body is not None
            and work.unserved is None
            and self._budget.try_keep_body(work.klass, work.lane, work.size_bytes)
        ):
            self._registry.transition(work, event, Stage.QUEUED)
        else:
            work.body = None
            lane.parked[work.klass] += 1
            self._registry.transition(work, event, Stage.PARKED)
        work.position = self._scheduler.statistics.up_to(work.klass)
        self._scheduler.add(work)
        self._statuses.say(work, "queued", now)
        if work.unserved is None:
            self._dirty.look_at(lane)
        else:
            self._unserved.wait(work, now)
