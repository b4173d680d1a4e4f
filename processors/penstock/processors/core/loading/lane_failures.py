"""Models that cannot be loaded, or were removed: the requests that wait for one are passed on, kept or ended."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.intake.unserved import UnservedRequests
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.runs.retry_queue import RetryQueue
from penstock.processors.core.work.states import IN_SCHEDULER, Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import ModelNotFound, PenstockError
from penstock.schemas.topics import CLASSES

FAILED_AT_ONCE = 256
"""How many are ended at a time when a model cannot be loaded."""
LOOKED_THROUGH = 1024
"""Of those who wait, when some are newer than the failure."""


@dataclass(eq=False)
class LaneFailures:
    """Notes which lanes have failed, and ends the requests that wait for them."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _unserved: UnservedRequests
    _endings: Endings
    _retries: RetryQueue
    _grants: Grants

    def load_is_hopeless(self, lane: Lane, error: PenstockError) -> None:
        """Requests that wait now are to end with this error, unless another replica serves them."""
        if not lane.ready:
            lane.fail_error, lane.fail_through = error, self._registry.next_seq()
            lane.wanted = False

    def end_waiting(self, lane: Lane, now: float) -> bool:
        """End who waited when the load failed, some at a time; whether more may wait."""
        if not lane.served:
            return self._end_removed(lane, now)
        if lane.ready:
            lane.fail_error = None  # one that was to be unloaded has come back: they can run
        error = lane.fail_error
        if error is None:
            return False
        near = itertools.islice(self._scheduler.fronts.waiting(lane.name), LOOKED_THROUGH)
        waiting = list(itertools.islice((work for work in near if work.seq <= lane.fail_through), FAILED_AT_ONCE))
        waiting += self._retries.waiting(lane.name)
        for work in waiting:
            self._end(lane, work, error, now)
        if not waiting:
            lane.fail_error = None
        return bool(waiting)

    def _end_removed(self, lane: Lane, now: float) -> bool:
        """End requests that wait for a removed model, some at a time, also behind a turn or in a paused class."""
        queued = any(self._scheduler.fronts.depth(lane.name, klass) for klass in CLASSES)
        if not queued and not self._retries.waiting(lane.name):
            return False  # asked at each tick, for as long as this worker lives
        error = ModelNotFound(f"the model {lane.name} is not served here any more", param="model")
        waiting = [
            work
            for work in self._registry.works.values()
            if work.lane == lane.name
            and work.end_with is None
            and (work.stage in IN_SCHEDULER or work.stage is Stage.RETRYING)
        ][:FAILED_AT_ONCE]
        for work in waiting:
            self._end(lane, work, error, now)
        return bool(waiting)

    def _end(self, lane: Lane, work: Work, error: PenstockError, now: float) -> None:
        if work.stage in (Stage.PREPARING, Stage.READY):  # on a replica that starts nothing new
            self._grants.take_from_its_replica(lane, work)
        unserved = self._unserved
        if lane.served and (unserved.pass_on_unloadable(work) or unserved.keep_unloadable(work, error, now)):
            return
        self._endings.end_waiting(work, "lane_failed", error, now)
