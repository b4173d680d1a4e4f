"""Looks now and then at what depends on time alone: saturation, and memory that lies idle in spite of work."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.loading.memory_waiters import MemoryWaiters
from penstock.processors.core.loading.view_maker import Views
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.work.work import Work

WATCH_S = 0.5


@dataclass(eq=False)
class FleetWatch:
    """Called at each tick."""

    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _memory: DeviceMemory
    _grants: Grants
    _waiters: MemoryWaiters
    _views: Views
    _dirty: DirtySet
    _idle_since: float | None = field(init=False, default=None)
    _watched_at: float = field(init=False, default=float("-inf"))

    def tick(self, now: float) -> None:
        """What is due by time: keep-alive, the next try of a load, a replica more for what is saturated."""
        for lane in self._lanes.values():
            full = bool(lane.ready) and not any(one.free_slots > 0 for one in lane.ready)
            if not full or lane.name not in self._scheduler.fronts.lanes():
                lane.saturated_since = None
            elif lane.saturated_since is None:
                lane.saturated_since = now
        self._dirty.plan_later(now)
        if now - self._watched_at >= WATCH_S:
            self._watched_at = now
            self._watch_idleness(now)

    def idle_in_spite_of_work(self, now: float) -> float:
        """Seconds for which work has waited for a model that would fit into free memory, and nothing was admitted."""
        return 0.0 if self._idle_since is None else now - self._idle_since

    def _watch_idleness(self, now: float) -> None:
        fits = not self._grants.held and any(
            lane.name in self._scheduler.fronts.lanes()
            and lane.served
            and not (lane.paused or lane.loading or lane.sizing)
            and now >= lane.not_before
            and not self._waiters.lack_memory(lane)
            and (bool(lane.ready) or lane.size_due or self._views.fits_now(lane, self._memory.booked(lane), now))
            for lane in self._lanes.values()
        )
        if not fits:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
