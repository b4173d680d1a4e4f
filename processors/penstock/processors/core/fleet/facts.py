"""What is said of models and of requests that wait for them. Reads, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.queue.explaining import LaneFacts
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.work import Work
from penstock.schemas.topics import CLASSES


@dataclass(eq=False)
class FleetFacts:
    """For the explainer, and for reports."""

    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _ledger: Ledger
    _memory: DeviceMemory
    _runs: RunMemory

    def of(self, work: Work) -> LaneFacts:
        lane = self._lanes[work.lane]
        need_bytes, device, ready = None, None, bool(lane.ready)
        if ready:
            own = (want for want in lane.run_wants.values() if want.work is work)
            if (want := self._runs.heads.get(work) or next(own, None)) is not None:
                need_bytes, device = want.need_bytes, want.device
        elif lane.short and lane.needs is not None:
            need_bytes = self._memory.booked(lane)
            devices = sorted(self._memory.candidate_devices(lane), key=lambda one: -self._ledger.free_bytes(one.device))
            device = devices[: lane.spec.count][-1].device if devices else None  # the one that is shortest of those
        return LaneFacts(
            ready=ready,
            slots=sum(one.slots for one in lane.ready),
            busy=sum(len(one.holders) for one in lane.ready),
            paused=lane.paused or work.klass in self._scheduler.paused,
            memory_short=need_bytes is not None or (ready and work.blocked_at is not None),
            loading_since=lane.load_span[0] if lane.loading else None,
            need_bytes=need_bytes,
            free_bytes=None if device is None else self._ledger.free_bytes(device),
        )

    def paused(self) -> list[str]:
        """Classes and models of which nothing new starts."""
        classes = [f"class/{klass}" for klass in CLASSES if klass in self._scheduler.paused]
        return classes + [f"model/{lane.name}" for lane in self._lanes.values() if lane.paused]

    def reason_of(self, lane: Lane) -> str | None:
        """Why a model has no replica that takes runs; None when nobody wants one."""
        if lane.never_fits is not None:
            return str(lane.never_fits)
        if lane.failures:
            return f"{lane.failures} loads in a row failed"
        if lane.short:
            return "it waits for memory"
        return None
