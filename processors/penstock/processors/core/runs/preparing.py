"""One candidate: whether it starts now, and what is done for it ahead if it does not: its bytes are read again, its
prompt is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.requests.admission import MANY, UNPREPARED, Admission, Refusal
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.runs.fetching import Fetching
from penstock.processors.core.runs.replica_choice import FreeCapacity
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work

PREPARE_PATIENCE_S = 0.25
"""So long room is kept for one whose prompt is being counted."""


@dataclass(eq=False)
class Preparing:
    """Asked for each candidate and the room that it would take."""

    _admission: Admission
    _grants: Grants
    _fetching: Fetching
    _statuses: Statuses
    _memory: RunMemory

    @staticmethod
    def startable(replica: Replica, work: Work) -> bool:
        if work.stage is Stage.READY:
            return True
        return work.stage is Stage.QUEUED and replica.inline and work.starts_unprepared

    def step(
        self, lane: Lane, work: Work, capacity: FreeCapacity, now: float, *, may_prepare: bool, must_fetch: bool = True
    ) -> Refusal | None:
        """None when it can start now; else what can be done for it ahead is done, and its room is set aside."""
        replica = capacity.replica
        if self.startable(replica, work):
            refusal = self._admission.on(replica, work, capacity.slots, capacity.tokens, now)
            if refusal is not None and refusal.reason == "memory":
                self._memory.lacks(lane, replica, work, refusal.device)
                work.blocked_at = now if work.blocked_at is None else work.blocked_at
                self._statuses.say(work, "waiting_for_memory", now)
            return refusal
        if work.stage is Stage.PARKED and (work.alone or work.group is not None):
            self._fetching.fetch_one(lane, work)  # it keeps others waiting until it has run
        elif work.stage is Stage.PARKED:
            if (device := self._memory.others_lack(replica, work, now)) is not None:
                return Refusal("memory", device=device)
            self._fetching.fetch(lane, work.klass, work if must_fetch else None)
        elif work.stage is Stage.QUEUED:
            if not may_prepare:
                return UNPREPARED
            self._grants.prepare(replica, work, now)
        waits_s = 0.0 if work.run is None else now - work.run.preparing_since
        if work.stage is not Stage.PARKED and waits_s < PREPARE_PATIENCE_S:
            capacity.set_aside(work.cost)
        return UNPREPARED

    def lacks_memory(self, lane: Lane, replica: Replica, work: Work, now: float) -> bool:
        """Whether it could start on this replica but for memory. It is noted that it waits for that."""
        refusal = self._admission.on(replica, work, 1, MANY, now)
        if refusal is not None:
            self._memory.lacks(lane, replica, work, refusal.device)
        return refusal is not None
