"""What devices and engines were measured to hold: it corrects grants, and teaches the estimates of the next loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.estimates import Estimates
from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import held_by_runs
from penstock.processors.core.fleet.views import HOST


@dataclass(eq=False)
class Measurements:
    """Observations of devices, and of the memory of replicas."""

    _ledger: Ledger
    _estimates: Estimates
    _lanes: Lanes
    _memory: DeviceMemory
    _dirty: DirtySet

    def observed(
        self,
        observed: Mapping[str, tuple[int, int]],
        now: float,
        measured: Mapping[tuple[str, int], Mapping[str, int]] | None = None,
        peaks: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        """By device, bytes in use by all programs and those of them by our engines; by replica and device, what it
        holds, and by replica the most that it has held of its first device.
        """
        known = {capacity.device for capacity in self._ledger.devices()}
        for device, (used_bytes, by_ours_bytes) in observed.items():
            if device in known:
                self._ledger.observe(device, used_bytes, by_ours_bytes)
        for (model, number), by_device in (measured or {}).items():
            replica = self._lanes[model].replicas.get(number)
            if replica is None:
                continue
            for device, measured_bytes in by_device.items():
                if device == replica.device:
                    self._measured(replica, measured_bytes, (peaks or {}).get((model, number), 0), now)
                elif device in replica.devices and replica.grant is not None:
                    self._ledger.measure(replica.grant, device, max(0, measured_bytes - held_by_runs(replica)))
        self._dirty.plan_soon()

    def unread(self, devices: Iterable[str]) -> None:
        """They could not be measured: nothing more is granted on them until they are."""
        known = {capacity.device for capacity in self._ledger.devices()}
        for device in known.intersection(devices):
            self._ledger.unobserve(device)

    def _measured(self, replica: Replica, measured_bytes: int, peak_bytes: int, now: float) -> None:
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
        self._ledger.measure(grant, device, own_bytes)
        replica.shared = replica.shared or of_runs > 0
        now_bytes = max(own_bytes, replica.least_bytes)
        # What an engine keeps of its runs' memory when they are over is theirs: it comes back to what is its own.
        kept_bytes = now_bytes if replica.shared else max(now_bytes, replica.peak_bytes, replica.bytes)
        for booked in (kept_bytes, now_bytes):
            if booked == replica.bytes or (booked < replica.bytes and not replica.shared):
                return
            if self._ledger.resize(grant, device, booked, now):
                if booked < replica.bytes:
                    self._memory.is_back()
                replica.bytes = booked
                return

    def warmed_up(self, lane: Lane, replica: Replica, measured_bytes: int, peak_bytes: int, now: float) -> None:
        """It is ready. On a card it holds by now what it will hold: what was granted beyond that comes back.

        Main memory is another matter: what an engine has reserved there it holds only once it has used it.
        """
        self._measured(replica, measured_bytes, peak_bytes, now)
        if replica.grant is None or replica.device in (None, HOST) or lane.needs is None:
            return
        self.learn(lane, replica, whole_life=True)
        enough = max(replica.peak_bytes, self._memory.booked(lane))
        replica.least_bytes = min(enough, max(replica.bytes, replica.least_bytes))
        if enough < replica.bytes:
            self._ledger.resize(replica.grant, replica.grant.device, enough, now)
            replica.bytes = enough

    def learn(self, lane: Lane, replica: Replica, *, whole_life: bool) -> None:
        """The peak of its life replaces the estimate for the next load.

        One that has hardly run, or died, has perhaps not seen its peak: it teaches only when it held more than is
        booked. So the estimate rises at once, and falls only by what has run long enough.
        """
        needs, kind = lane.needs, self._memory.kind_of(replica)
        if kind is None or not replica.peak_bytes or needs is None:
            return
        key = self._memory.key_of(lane, kind)
        if whole_life or replica.peak_bytes > self._estimates.need(key, needs.shape, needs.load_bytes):
            self._estimates.learn(key, needs.shape, replica.peak_bytes, needs.load_bytes)

    def out_of_memory(self, model: str, number: int, now: float) -> None:
        """Memory ran out on it in spite of its grant: the next load gets more. Its engine has made batches smaller."""
        lane = self._lanes[model]
        replica = lane.replicas.get(number)
        if replica is not None:
            self.ran_out(lane, replica)

    def ran_out(self, lane: Lane, replica: Replica) -> None:
        kind, needs = self._memory.kind_of(replica), lane.needs
        if kind is not None and needs is not None and not needs.exact:
            self._estimates.raise_after_oom(self._memory.key_of(lane, kind), needs.shape, replica.booked_bytes)
            self._dirty.plan_soon()

    def settled(self, replica: Replica, now: float) -> None:
        """It is loaded: the main memory that its weights passed through comes back."""
        grant = replica.grant
        if grant is not None and replica.device != HOST and HOST in grant.needs:
            self._ledger.resize(grant, HOST, 0, now)
