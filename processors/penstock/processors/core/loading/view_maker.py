"""Models, replicas and runs as placement sees them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet import views as plan
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.fleet.run_memory import RunMemory, held_by_runs
from penstock.processors.core.fleet.views import HOST
from penstock.processors.core.loading.memory_waiters import MemoryWaiters
from penstock.processors.core.queue.forecast import Forecast

FIRST_LOAD_S, LOAD_BYTES_PER_S = 1.0, 1 << 30
"""The estimate of a load before the first was measured: seconds at least, and bytes read in a second."""
LARGEST_OF_HOST = 2
"""Weights on their way to a card are booked with such a part of main memory at most."""


@dataclass(eq=False)
class Views:
    """Reads, changes nothing."""

    _ledger: Ledger
    _memory: DeviceMemory
    _runs: RunMemory
    _waiters: MemoryWaiters
    _forecast: Forecast

    def model(self, lane: Lane, now: float) -> plan.ModelView:
        needs = lane.needs
        assert needs is not None
        spec = lane.spec
        load_s = self._forecast.load_s(lane.name)
        if load_s is None:
            load_s = max(FIRST_LOAD_S, needs.load_bytes / LOAD_BYTES_PER_S)
        booked, host_bytes = self._memory.booked(lane), self._through_host(needs.host_bytes)
        fits = self.fits_now(lane, booked, now)
        up = sum(one.state in (ReplicaState.READY, ReplicaState.LOADING) for one in lane.replicas.values())
        desired = lane.desired is True or None
        runs_wait = any(waiter.replica.model == lane.name for waiter in self._runs.waiters.values())
        # A second replica gives way to a run that needs the memory; the model itself does not.
        least = 0 if spec.min_replicas < 2 or not up or runs_wait else min(spec.min_replicas, up + fits)
        return plan.ModelView(
            model=lane.name,
            needs={
                name: plan.Need(bytes=booked, host_bytes=0 if name == HOST else host_bytes, devices=spec.count)
                for name in self._large_enough(lane)
            },
            load_seconds=load_s,
            run_seconds=self._forecast.run_s(lane.name) or 0.0,
            priority=spec.priority,
            pinned=lane.is_pinned and lane.served,
            # It takes free memory, and nobody's place.
            preload=fits and lane.wanted and not up and not lane.paused,
            keep_alive_s=spec.keep_alive_s,
            min_replicas=least,
            max_replicas=max(spec.max_replicas, spec.min_replicas),
            desired_loaded=desired if lane.served else False,
            paused=lane.paused,
            broken_until=plan.NEVER if lane.size_due else lane.not_before,
            saturated_since=lane.saturated_since,
            use_rate=lane.uses.rate(now),
            demand=plan.Demand() if lane.never_fits is not None else self._waiters.demand(lane),
        )

    def _through_host(self, weights_bytes: int) -> int:
        """Main memory for weights on their way to a card; of large ones the kernel takes back pages meanwhile."""
        limit = next((one.limit_bytes for one in self._ledger.devices() if one.device == HOST), 0)
        return min(weights_bytes, limit // LARGEST_OF_HOST)

    def _large_enough(self, lane: Lane) -> list[str]:
        """Names or kinds of devices on which it may be loaded, the preferred first."""
        if not lane.too_small:
            return list(lane.spec.devices)
        names = dict.fromkeys(
            one.device for one in self._memory.candidate_devices(lane) if one.device not in lane.too_small
        )
        return list(names) or list(lane.spec.devices)

    def fits_now(self, lane: Lane, need_bytes: int, now: float) -> bool:
        devices = self._memory.candidate_devices(lane)
        return lane.spec.count <= sum(
            need_bytes <= self._ledger.free_for(one.device, lane.name, now) for one in devices
        )

    def replica(self, lane: Lane, replica: Replica) -> plan.ReplicaView:
        grant = replica.grant
        never = float("-inf")
        return plan.ReplicaView(
            model=replica.model,
            replica=replica.number,
            device=replica.device or "",
            state=replica.state.value,
            bytes={}
            if grant is None
            else {device: self._ledger.comes_back_bytes(grant, device) for device in grant.needs},
            ready_at=None if replica.ready_at == float("inf") else replica.ready_at,
            last_used_at=None if replica.last_used == never else replica.last_used,
            running=len(replica.holders),
            queued_for_it=len(replica.ahead),
            klass=replica.most_urgent(),
            for_model=replica.ending_for,
            run_bytes=held_by_runs(replica),
            end_reason=lane.reason_to_end(replica),
            stands=not replica.holders and self._waiters.lacks_memory(lane, replica),
        )
