"""The ledger in the flow: what devices have free, what models need, and what replicas and runs are granted of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.processors.core.estimates import EstimateKey
from penstock.processors.core.fleet import HOST
from penstock.processors.core.lane import Lane
from penstock.processors.core.ledger import DeviceCapacity
from penstock.processors.core.replica import Replica
from penstock.processors.core.residents import Needs
from penstock.processors.core.run_memory import held_by_runs
from penstock.processors.core.runs import Runs
from penstock.schemas.errors import InsufficientCapacity, PenstockError
from penstock.schemas.records import Requirements


class Memory(Runs):
    """No memory is used without a grant of the ledger, and every grant comes back when what holds it has ended."""

    # -- what is told

    def devices_observed(
        self,
        observed: Mapping[str, tuple[int, int]],
        now: float,
        measured: Mapping[tuple[str, int], Mapping[str, int]] | None = None,
        peaks: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """By device, bytes in use by all programs and those of them by our engines; by replica and device, what it
        holds, and by replica the most that it has held of its first device.
        """
        known = {capacity.device for capacity in self.ledger.devices()}
        for device, (used_bytes, by_ours_bytes) in observed.items():
            if device in known:
                self.ledger.observe(device, used_bytes, by_ours_bytes)
        for (model, number), by_device in (measured or {}).items():
            replica = self.lane(model).replicas.get(number)
            if replica is None:
                continue
            for device, measured_bytes in by_device.items():
                if device == replica.device:
                    self._measured(replica, measured_bytes, (peaks or {}).get((model, number), 0))
                elif device in replica.devices:
                    self._measured_beside(replica, device, measured_bytes)
        self._plan_soon()

    def devices_unread(self, devices: Iterable[str]) -> None:
        """They could not be measured: nothing more is granted on them until they are."""
        known = {capacity.device for capacity in self.ledger.devices()}
        for device in known.intersection(devices):
            self.ledger.unobserve(device)

    def sized(self, model: str, needs: Needs, now: float) -> None:
        """How much memory an engine of the model takes."""
        lane = self.lane(model)
        lane.sizing, lane.size_due, lane.needs = False, False, needs
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
        devices, count = self._candidate_devices(lane), lane.spec.count
        fitting = sum(need_bytes <= one.limit_bytes for one in devices)
        if not need_bytes or fitting >= count:
            return None
        if not devices:
            return self.ledger.insufficient(lane.name, dict.fromkeys(lane.spec.devices or ("any device",), need_bytes))
        if fitting:
            return InsufficientCapacity(
                f"{lane.name} needs {need_bytes / 2**20:.0f} MiB on each of {count} devices; {fitting} can grant that",
                details={"need": count * need_bytes, "capacity": fitting * need_bytes, "unit": "bytes"},
            )
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
            self._memory_is_back()  # runs that wait for it are looked at before placement gives it to a load
        self._plan_soon()

    def _booked(self, lane: Lane) -> int:
        """What one engine of the model is granted: its estimate with a margin, or what was measured of others."""
        needs = lane.needs
        assert needs is not None
        if needs.exact or not needs.load_bytes:
            return needs.load_bytes
        devices = self._candidate_devices(lane)
        booked = max(
            (self.estimates.need(self._key(lane, one.kind), needs.shape, needs.load_bytes) for one in devices),
            default=needs.load_bytes,
        )
        largest = max((one.limit_bytes for one in devices), default=0)
        return min(booked, max(needs.load_bytes, largest - needs.run_bytes))  # the margin alone forbids nothing

    @staticmethod
    def _key(lane: Lane, kind: str) -> EstimateKey:
        return EstimateKey(lane.spec.source or lane.name, kind, lane.spec.dtype)

    def _measured(self, replica: Replica, measured_bytes: int, peak_bytes: int = 0) -> None:
        """What it holds now and has held, less what its runs were granted.

        Beyond its grant that is booked too: what it took once it may take again. Where it does not fit, what it holds
        counts as taken.
        """
        of_runs = held_by_runs(replica)
        own_bytes = max(0, measured_bytes - of_runs)
        replica.measured_bytes = own_bytes
        replica.peak_bytes = max(replica.peak_bytes, own_bytes, peak_bytes - of_runs)
        grant, device = replica.grant, replica.device
        if grant is None or device is None:
            return
        self.ledger.measure(grant, device, own_bytes)
        replica.shared = replica.shared or of_runs > 0
        now_bytes = max(own_bytes, replica.least_bytes)
        # What an engine keeps of its runs' memory when they are over is theirs: it comes back to what is its own.
        kept_bytes = now_bytes if replica.shared else max(now_bytes, replica.peak_bytes, replica.bytes)
        for booked in (kept_bytes, now_bytes):
            if booked == replica.bytes or (booked < replica.bytes and not replica.shared):
                return
            if self.ledger.resize(grant, device, booked):
                if booked < replica.bytes:
                    self._memory_is_back()
                replica.bytes = booked
                return

    def _measured_beside(self, replica: Replica, device: str, measured_bytes: int) -> None:
        """What it holds of a device beside its first."""
        if replica.grant is not None:
            self.ledger.measure(replica.grant, device, max(0, measured_bytes - held_by_runs(replica)))

    def _warmed_up(self, lane: Lane, replica: Replica, measured_bytes: int, peak_bytes: int) -> None:
        """It is ready. On a card it holds by now what it will hold: what was granted beyond that comes back.

        Main memory is another matter: what an engine has reserved there it holds only once it has used it.
        """
        self._measured(replica, measured_bytes, peak_bytes)
        if replica.grant is None or replica.device in (None, HOST) or lane.needs is None:
            return
        self._learn(lane, replica, whole_life=True)
        enough = max(replica.peak_bytes, self._booked(lane))
        replica.least_bytes = min(enough, max(replica.bytes, replica.least_bytes))
        if enough < replica.bytes:
            self.ledger.resize(replica.grant, replica.grant.device, enough)
            replica.bytes = enough

    def _learn(self, lane: Lane, replica: Replica, *, whole_life: bool) -> None:
        """The peak of its life replaces the estimate for the next load.

        One that has hardly run, or died, has perhaps not seen its peak: it teaches only when it held more than is
        booked. So the estimate rises at once, and falls only by what has run long enough.
        """
        needs, kind = lane.needs, self._kind_of(replica)
        if kind is None or not replica.peak_bytes or needs is None:
            return
        key = self._key(lane, kind)
        if whole_life or replica.peak_bytes > self.estimates.need(key, needs.shape, needs.load_bytes):
            self.estimates.learn(key, needs.shape, replica.peak_bytes, needs.load_bytes)

    def _kind_of(self, replica: Replica) -> str | None:
        return next((one.kind for one in self.ledger.devices() if one.device == replica.device), None)

    def replica_out_of_memory(self, model: str, number: int, now: float) -> None:
        """Memory ran out on it in spite of its grant: the next load gets more. Its engine has made batches smaller."""
        lane = self.lane(model)
        replica = lane.replicas.get(number)
        if replica is not None:
            self._ran_out(lane, replica)

    def _ran_out(self, lane: Lane, replica: Replica) -> None:
        kind, needs = self._kind_of(replica), lane.needs
        if kind is not None and needs is not None and not needs.exact:
            self.estimates.raise_after_oom(self._key(lane, kind), needs.shape, replica.booked_bytes)
            self._plan_soon()

    def _settled(self, replica: Replica) -> None:
        """It is loaded: the main memory that its weights passed through comes back."""
        grant = replica.grant
        if grant is not None and replica.device != HOST and HOST in grant.needs:
            self.ledger.resize(grant, HOST, 0)

    def _plan_soon(self) -> None:
        """Something changed that placement reads: the next step plans anew."""
        self._plan_due = True
