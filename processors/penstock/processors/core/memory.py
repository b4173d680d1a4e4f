"""The ledger in the flow: what devices have free, what models need, and what replicas and runs are granted of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.processors.core.fleet import HOST
from penstock.processors.core.lane import Lane
from penstock.processors.core.ledger import DeviceCapacity
from penstock.processors.core.replica import Replica
from penstock.processors.core.residents import Needs
from penstock.processors.core.runs import Runs
from penstock.schemas.errors import InsufficientCapacity, PenstockError
from penstock.schemas.records import Requirements

MARGIN = 1.1
"""Of what was measured: runs differ, and allocators keep what they had."""


class Memory(Runs):
    """No memory is used without a grant of the ledger, and every grant comes back when what holds it has ended."""

    # -- what is told

    def devices_observed(
        self,
        observed: Mapping[str, tuple[int, int]],
        now: float,
        measured: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """By device, bytes in use by all programs and those of them by our engines; by replica, what it holds."""
        known = {capacity.device for capacity in self.ledger.devices()}
        for device, (used_bytes, by_ours_bytes) in observed.items():
            if device in known:
                self.ledger.observe(device, used_bytes, by_ours_bytes)
        for (model, number), measured_bytes in (measured or {}).items():
            lane = self.lane(model)
            replica = lane.replicas.get(number)
            if replica is None:
                continue
            self._measured(lane, replica, measured_bytes)
        self._plan_soon()

    def sized(self, model: str, needs: Needs, now: float) -> None:
        """How much memory an engine of the model takes."""
        lane = self.lane(model)
        lane.sizing, lane.needs = False, needs
        lane.never_fits = self._cannot_ever(lane, needs.load_bytes + needs.run_bytes)
        if lane.never_fits is not None:
            self._load_is_hopeless(lane, lane.never_fits, now)
        self._plan_soon()
        self._mark_changed(lane)

    def size_failed(self, model: str, error: BaseException, now: float) -> None:
        """How much it takes could not be found out: that counts as a load that failed."""
        lane = self.lane(model)
        lane.sizing = False
        known = lane.load_failed(error, now)
        if known is not None:
            self._load_is_hopeless(lane, known, now)
        self._plan_soon()
        self._mark_changed(lane)

    def _load_is_hopeless(self, lane: Lane, error: PenstockError, now: float) -> None:
        """Those who wait are told, unless another replica serves them."""
        if not lane.ready:
            lane.fail_error, lane.fail_through = error, next(self._seq)
            lane.wanted = False

    # -- what fits

    def _candidate_devices(self, lane: Lane) -> list[DeviceCapacity]:
        return [one for name in lane.spec.devices for one in self.ledger.devices() if name in (one.device, one.kind)]

    def _cannot_ever(self, lane: Lane, need_bytes: int) -> InsufficientCapacity | None:
        """The error for what no device that the model may use could hold, were it empty."""
        devices = self._candidate_devices(lane)
        if not need_bytes or any(need_bytes <= one.limit_bytes for one in devices):
            return None
        if not devices:
            return self.ledger.insufficient(lane.name, dict.fromkeys(lane.spec.devices or ("any device",), need_bytes))
        largest = max(devices, key=lambda one: one.limit_bytes)
        return self.ledger.insufficient(lane.name, {largest.device: need_bytes})

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
            limits = {one.device: one.limit_bytes for one in self.ledger.devices() if one.kind in kinds}
            if not any(need <= limit for limit in limits.values()):
                best = max(limits, key=lambda device: limits[device], default=kinds[0])
                raise self.ledger.insufficient("the request", {best: need})
        if requirements.vram_bytes and lane.spec.devices:
            error = self._cannot_ever(lane, requirements.vram_bytes)
            if error is not None and any(one.kind != HOST for one in self._candidate_devices(lane)):
                raise error

    # -- grants of replicas

    def _release(self, replica: Replica) -> None:
        """What the replica holds comes back: its process has ended."""
        grant, replica.grant = replica.grant, None
        if grant is not None:
            self.ledger.release(grant)
        self._plan_soon()

    def _measured(self, lane: Lane, replica: Replica, measured_bytes: int) -> None:
        """What it holds was measured: that replaces the estimate, for this replica and for the next load."""
        replica.measured_bytes = measured_bytes
        grant, device = replica.grant, replica.device
        if grant is None or device is None:
            return
        self.ledger.measure(grant, device, measured_bytes)
        needs = lane.needs
        if needs is not None and measured_bytes > needs.load_bytes:
            lane.needs = replace(needs, load_bytes=measured_bytes)
        if measured_bytes > replica.bytes:
            self.ledger.resize(grant, device, measured_bytes)  # where it does not fit, it counts as taken all the same
            replica.bytes = measured_bytes

    def _warmed_up(self, lane: Lane, replica: Replica, measured_bytes: int) -> None:
        """It is ready, and a run of the largest shape was tried: what it then held is what it needs, with a margin."""
        self._measured(lane, replica, measured_bytes)
        enough = round(measured_bytes * MARGIN)
        if (
            replica.grant is not None
            and replica.device is not None
            and enough < replica.bytes
            and lane.needs is not None
        ):
            self.ledger.resize(replica.grant, replica.device, enough)
            replica.bytes = enough
            lane.needs = replace(lane.needs, load_bytes=enough)

    def _settled(self, replica: Replica) -> None:
        """It is loaded: the main memory that its weights passed through comes back."""
        grant = replica.grant
        if grant is not None and replica.device != HOST and HOST in grant.needs:
            self.ledger.resize(grant, HOST, 0)

    def _plan_soon(self) -> None:
        """Something changed that placement reads: the next step plans anew."""
        self._plan_due = True
