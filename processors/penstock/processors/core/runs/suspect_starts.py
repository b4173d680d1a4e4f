"""Suspects: requests under which an engine or a worker died. They run apart from others, so that those do not die with
them: a group of them on a replica that is kept for it, and by itself the one under which two workers died.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.alone import AloneClaim
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.requests.admission import MANY, Admission
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.runs.preparing import Preparing
from penstock.processors.core.runs.replica_choice import FreeCapacity
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.suspects import set_apart
from penstock.processors.core.work.work import Work

Grant = tuple[Work, Replica]


@dataclass(eq=False)
class SuspectStarts:
    """Where a suspect may run now, and who of them is next. Grants nothing."""

    _admission: Admission
    _claim: AloneClaim
    _grants: Grants
    _memory: RunMemory
    _preparing: Preparing

    def empty(
        self, capacities: list[FreeCapacity], waited_for: list[Replica], work: Work, now: float
    ) -> list[FreeCapacity]:
        """Where a suspect can run now and takes nothing from those before it. One that must run alone waits."""
        return [
            capacity
            for capacity in capacities
            if not work.alone
            and not capacity.replica.holders
            and capacity.replica not in waited_for
            and self._memory.is_free(capacity.replica, work, now)
        ]

    def may_go_apart(self, lane: Lane, capacities: list[FreeCapacity], work: Work, now: float) -> bool:
        """Whether a replica, or for one that must run alone the worker, is kept for it from now on."""
        if work.alone:
            return self.may_be_alone(lane, work, now)
        kept = next((one for one in lane.ready if one.exclusive is work.group), None)
        if kept is None:
            return True
        # Its group fills the replica that is kept for it: it need not wait for them beside an empty one.
        empty = [capacity.replica for capacity in capacities if not capacity.replica.holders]
        leaves = kept.free_slots <= 0 and any(self._memory.is_free(one, work, now) for one in empty)
        if leaves:
            set_apart(work)
        return leaves

    def may_be_alone(self, lane: Lane, work: Work, now: float) -> bool:
        """Whether all others must wait for it: only while nothing but them keeps it from starting, and not for long.

        `lane` is its own. What it waits for else (its model, a slot, memory, a busy server, an order) may be long.
        """
        if self._admission.of_queue(lane, work) is not None:
            return False
        replica = self._replica_for(lane, lane.ready, work)
        prepared = self._preparing.startable(replica, work)
        if not self._claim.is_due(work, now, prepared=prepared):
            return False
        if now < replica.busy_until or replica.free_slots <= 0:
            return False
        return not (prepared and self._preparing.lacks_memory(lane, replica, work, now))

    def _replica_for(self, lane: Lane, able: list[Replica], work: Work) -> Replica:
        waiter = self._memory.waiters.get(work)
        if waiter is not None and waiter.replica in able:
            return waiter.replica
        return lane.replica_of(work) or min(able, key=lambda one: len(one.holders))

    def alone(self, lane: Lane, able: list[Replica], work: Work, now: float) -> Grant | None:
        """The one that must run by itself, once nothing else runs on this worker."""
        if not self._admission.is_waiting(lane, work):
            return None
        replica = self._replica_for(lane, able, work)
        if replica not in able:
            return None
        refusal = self._preparing.step(lane, work, FreeCapacity(replica, 1, MANY), now, may_prepare=True)
        if refusal is not None or self._grants.held:
            return None
        return (work, replica) if FreeCapacity.of(replica).fits(work) else None

    def next_of_group(self, lane: Lane, replica: Replica, now: float) -> Work | None:
        """Suspects start when all others have left the replica; then nobody else does until they have ended."""
        group = replica.exclusive
        if group is None:
            return None
        others = any(holder.group is not group for holder in replica.holders)
        capacity = FreeCapacity.of(replica)
        for work in sorted(group.members, key=lambda member: member.seq):
            if not self._admission.may_join(lane, work):
                continue
            if work.stage is Stage.READY and lane.replica_of(work) is not replica:
                self._grants.take_from_its_replica(lane, work)
            if self._preparing.step(lane, work, capacity, now, may_prepare=True) is None and not others:
                return work
        return None

    def move(self, able: list[Replica], now: float) -> None:
        """They need not wait for others, or for memory, on the replica that is kept for them while another is empty."""
        for replica in able:
            group = replica.exclusive
            if group is None:
                continue
            if replica.holders:
                stays = all(holder.group is group for holder in replica.holders)
            else:
                stays = any(self._memory.is_free(replica, work, now) for work in group.members)
            if stays:
                continue
            for other in able:
                empty = other.exclusive is None and not other.holders
                if empty and all(self._memory.is_free(other, work, now) for work in group.members):
                    replica.exclusive, other.exclusive = None, group
                    break
