"""The ledger in the flow: what devices have free, what models need, and what replicas and runs are granted of it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.estimates import EstimateKey, Estimates
from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.fleet.ledger import DeviceCapacity, Ledger
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.fleet.views import HOST
from penstock.schemas.errors import InsufficientCapacity
from penstock.schemas.records import Requirements


@dataclass(eq=False)
class DeviceMemory:
    """No memory is used without a grant of the ledger, and every grant comes back when what holds it has ended."""

    _ledger: Ledger
    _estimates: Estimates
    _lanes: Lanes
    _runs: RunMemory
    _dirty: DirtySet

    # -- what fits

    def candidate_devices(self, lane: Lane) -> list[DeviceCapacity]:
        return [one for name in lane.spec.devices for one in self._ledger.devices() if name in (one.device, one.kind)]

    def cannot_ever(self, lane: Lane, need_bytes: int) -> InsufficientCapacity | None:
        """The error for what no device that the model may use could hold, were it empty."""
        devices, count = self.candidate_devices(lane), lane.spec.count
        fitting = sum(need_bytes <= one.limit_bytes for one in devices)
        if not need_bytes or fitting >= count:
            return None
        if not devices:
            return self._ledger.insufficient(lane.name, dict.fromkeys(lane.spec.devices or ("any device",), need_bytes))
        if fitting:
            return InsufficientCapacity(
                f"{lane.name} needs {need_bytes / 2**20:.0f} MiB on each of {count} devices; {fitting} can grant that",
                details={"need": count * need_bytes, "capacity": fitting * need_bytes, "unit": "bytes"},
            )
        largest = max(devices, key=lambda one: one.limit_bytes)
        return self._ledger.insufficient(lane.name, {largest.device: need_bytes})

    def check_fits(self, lane: Lane, requirements: Requirements | None) -> None:
        """Raises InsufficientCapacity, naming need and capacity, for what can never fit."""
        if lane.never_fits is not None:
            raise lane.never_fits
        if requirements is None:
            return
        for need, kinds in (
            (requirements.vram_bytes, ("cuda", "simulated")),
            (requirements.cpu_memory_bytes, ("cpu",)),
        ):
            if not need:
                continue
            limits = {one.device: one.limit_bytes for one in self._ledger.devices() if one.kind in kinds}
            if not any(need <= limit for limit in limits.values()):
                best = max(limits, key=lambda device: limits[device], default=kinds[0])
                raise self._ledger.insufficient("the request", {best: need})
        if requirements.vram_bytes and lane.spec.devices:
            error = self.cannot_ever(lane, requirements.vram_bytes)
            if error is not None and any(one.kind != HOST for one in self.candidate_devices(lane)):
                raise error

    # -- grants of replicas

    def release(self, replica: Replica) -> None:
        """What the replica holds comes back: its process has ended."""
        grant, replica.grant = replica.grant, None
        if grant is not None:
            self._ledger.release(grant)
            self.is_back()  # runs that wait for it are looked at before placement gives it to a load
        self._dirty.plan_soon()

    def booked(self, lane: Lane) -> int:
        """What one engine of the model is granted: its estimate with a margin, or what was measured of others."""
        needs = lane.needs
        assert needs is not None
        if needs.exact or not needs.load_bytes:
            return needs.load_bytes
        devices = self.candidate_devices(lane)
        booked = max(
            (self._estimates.need(self.key_of(lane, one.kind), needs.shape, needs.load_bytes) for one in devices),
            default=needs.load_bytes,
        )
        largest = max((one.limit_bytes for one in devices), default=0)
        return min(booked, max(needs.load_bytes, largest - needs.run_bytes))  # the margin alone forbids nothing

    @staticmethod
    def key_of(lane: Lane, kind: str) -> EstimateKey:
        return EstimateKey(lane.spec.source or lane.name, kind, lane.spec.dtype)

    def kind_of(self, replica: Replica) -> str | None:
        return next((one.kind for one in self._ledger.devices() if one.device == replica.device), None)

    def never_runs(self, replica: Replica | None, memory_bytes: int) -> InsufficientCapacity | None:
        """The error for a run that no device of its model could hold beside the model itself, were it empty."""
        if replica is None or replica.device is None or not memory_bytes:
            return None
        need = replica.least_bytes + memory_bytes
        names = (replica.device, *self._lanes[replica.model].spec.devices)
        limits = {one.device: one.limit_bytes for one in self._ledger.devices() if {one.device, one.kind} & {*names}}
        if any(need <= limit for limit in limits.values()):
            return None
        largest = max(limits, key=lambda device: limits[device])
        return self._ledger.insufficient(f"{replica.model} with this run", {largest: need})

    def is_back(self) -> None:
        """Others may wait for it: placement is asked at once when they do, for each run that ends it would be dear."""
        if self._runs.waiters:
            self._dirty.plan_soon()
        for lane in self._lanes.values():
            if lane.short:
                self._dirty.plan_soon()
            if lane.run_wants:
                self._dirty.look_at(lane)
