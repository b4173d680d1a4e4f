"""Memory that runs take beyond what their replica holds: how much, whether it is free, who is first to get it.

Of the runs that wait for memory of a device one is its *waiter*: room is made and kept for that one alone. All others
wait and hold nothing. Why nobody waits for ever is in `docs/decisions/0030`.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.lane import Lane, RunWant
from penstock.processors.core.fleet.ledger import Ledger, MemoryGrant
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.views import HOST
from penstock.processors.core.work.work import Work


@dataclass(frozen=True, slots=True)
class MemoryWaiter:
    """The run that is first to get memory of a device. `owner`: its name in placement and reservations.

    `klass`, `oldest`: the most urgent class that waits for its model, and when the oldest of that came: for it the run
    is in the queue with models that wait to be loaded. `since`: when its wait began to count against others.
    Seconds of the flow's clock.
    """

    work: Work
    replica: Replica
    device: str
    need_bytes: int
    owner: str
    klass: str
    oldest: float
    since: float


def run_owner(model: str) -> str:
    """Who holds the memory of a model's runs, in the ledger."""
    return f"{model} (runs)"


def waiter_owner(work: Work) -> str:
    """Whom room is kept for, when this run is the waiter of its device."""
    return f"{work.lane} (run {work.seq})"


def run_bytes(replica: Replica, work: Work) -> int:
    """What its run takes of each device beyond what the replica holds; the request's own requirements are a floor."""
    if replica.device is None:
        return 0
    need = max(replica.run_bytes, work.memory_bytes)
    if (known := work.requirements) is not None:
        floor = known.cpu_memory_bytes if replica.device == HOST else known.vram_bytes
        need = max(need, (floor or 0) - replica.bytes)
    return need


def held_by_runs(replica: Replica) -> int:
    """What the runs on a replica are granted of each of its devices."""
    grants = [work.run.grant for work in replica.holders if work.run is not None and work.run.grant is not None]
    return sum(grant.bytes for grant in grants)


class RunMemory:
    """Asked at each start. `waiters`: by work, those that room is made for; the flow chooses them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.waiters: dict[Work, MemoryWaiter] = {}
        self.waiter_left = False
        """A waiter got its memory: the flow chooses the next one."""
        self._seen: set[str] = set()

    def walk_begins(self) -> None:
        """From here on the first of a device that lacks memory is the one that its model waits with."""
        self._seen.clear()

    def is_free(self, replica: Replica, work: Work, now: float) -> bool:
        """Whether what its run takes of each of the replica's devices is free for it now."""
        return self.short_device(replica, work, now) is None

    def short_device(self, replica: Replica, work: Work, now: float) -> str | None:
        """The first of the replica's devices that has not what its run takes; None when all have it."""
        need = run_bytes(replica, work)
        if not need or replica.device is None:
            return None
        free_for, claimant = self._ledger.free_for, self._claimant(replica, work)
        for device in replica.devices:
            if free_for(device, claimant, now) < need:
                return device
        return None

    def fits_ever(self, replica: Replica, work: Work) -> bool:
        """Whether the replica's devices could hold its run beside the replica, if nothing else were there."""
        need = run_bytes(replica, work)
        if not need or replica.device is None:
            return True
        own_bytes = self.own_bytes(replica)
        return all(own_bytes + need <= self._ledger.limit_bytes(device) for device in replica.devices)

    @staticmethod
    def own_bytes(replica: Replica) -> int:
        """What it takes without runs. What is measured while some run on it may be theirs."""
        return replica.least_bytes if replica.holders else max(replica.least_bytes, replica.measured_bytes or 0)

    def lacks(self, lane: Lane, replica: Replica, work: Work, device: str | None) -> None:
        """It could start but for memory of this device: the first of a walk is noted on its lane."""
        if device is not None and device not in self._seen:
            self._seen.add(device)
            lane.run_wants[device] = RunWant(work, replica, device, run_bytes(replica, work))

    def others_lack(self, replica: Replica, work: Work, now: float) -> str | None:
        """The device that lacks memory for its run, and for one that this walk has met before it."""
        device = self.short_device(replica, work, now)
        return device if device in self._seen else None

    def grant(self, replica: Replica, work: Work, now: float) -> MemoryGrant | None:
        """Give it what it takes, which is free; None when it takes nothing."""
        need = run_bytes(replica, work)
        if not need or replica.device is None:
            return None
        claimant, owner = self._claimant(replica, work), run_owner(replica.model)
        grant = self._ledger.grant(owner, dict.fromkeys(replica.devices, need), now, reserved_as=claimant)
        assert grant is not None, "it was free a moment ago"
        return grant

    def release(self, grant: MemoryGrant) -> None:
        self._ledger.release(grant)

    def started(self, lane: Lane, work: Work) -> None:
        """It waits for no memory any more."""
        if self.waiters.pop(work, None) is not None:
            self.waiter_left = True
        for device in [device for device, want in lane.run_wants.items() if want.work is work]:
            del lane.run_wants[device]

    def _claimant(self, replica: Replica, work: Work) -> str:
        waiter = self.waiters.get(work)
        return run_owner(replica.model) if waiter is None or waiter.device not in replica.devices else waiter.owner
