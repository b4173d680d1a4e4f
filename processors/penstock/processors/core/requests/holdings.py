"""What a request holds (its place in the queue, its conversation, run, memory and bytes), and how it comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.effects import CancelRun, Effect
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.rereads import Rereads
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.work.states import IN_SCHEDULER, OVER, Stage
from penstock.processors.core.work.suspects import clear_suspicion
from penstock.processors.core.work.work import Work


@dataclass(eq=False)
class Holdings:
    """Gives back what a request holds, to each owner in a fixed order, and nothing twice."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _budget: Budget
    _lanes: Lanes
    _memory: DeviceMemory
    _grants: Grants
    _runs: RunMemory
    _dirty: DirtySet
    _emit: Callable[[Effect], None]
    rereads: Rereads

    def drop(self, work: Work) -> None:
        if work.stage in OVER:
            return
        self.stop_run(work)
        self.leave_waiting(work)
        self._registry.transition(work, "drop", Stage.DROPPED)
        self.forget(work)

    def forget(self, work: Work) -> None:
        self._registry.forget(work)
        if work.in_budget:
            self._budget.drop_fact(work.tp)
            if work.body is not None:
                self._budget.drop_body(work.klass, work.lane, work.size_bytes)
            self.rereads.over(work)
        clear_suspicion(work)
        if work.conversation is not None and work.holds_conversation:
            self._scheduler.release_conversation(work.conversation)
            self._dirty.look_at_all(self._lanes.values())  # the next turn may be for another model

    def stop_run(self, work: Work) -> None:
        """Its engine need not go on, and what it held comes back."""
        if work.run is not None and work.stage in (Stage.PREPARING, Stage.READY, Stage.BEGINNING, Stage.RUNNING):
            self._emit(CancelRun(work.lane, work.run.replica, work.run.run_id))
            replica = self._lanes[work.lane].replica_of(work)
            if replica is not None:
                replica.stopped_at = self._dirty.now
        self.give_back(work)

    def leave_waiting(self, work: Work) -> None:
        if work.stage in IN_SCHEDULER:
            if work.stage is Stage.PARKED:
                self._lanes[work.lane].parked[work.klass] -= 1
            self.stop_run(work)
            self.unqueue(work)

    def unqueue(self, work: Work) -> None:
        """Out of the scheduler, which releases its conversation. What waits for a retry is not there."""
        if self._scheduler.remove(work):
            work.holds_conversation = False

    def drop_body_over_share(self, work: Work) -> None:
        """It waits for its next attempt, and its bytes are read again before that if its share has no room for them."""
        if self._budget.over_share(work.klass, work.lane):
            self.park(work)

    def move_body(self, work: Work, klass: str) -> None:
        """Count its bytes for another class. Drop them if it waits and the share of that class has no room."""
        has_room = self._budget.room(klass, work.lane) >= work.size_bytes
        if not has_room and self.park(work):
            return
        if work.body is not None:
            self._budget.drop_body(work.klass, work.lane, work.size_bytes)
            self._budget.keep_body(klass, work.lane, work.size_bytes)

    def count(self, work: Work) -> None:
        """The budget counts it from now on. What waits for its time to start has a bound of its own."""
        if not work.in_budget:
            work.in_budget = True
            self._budget.count_fact(work.tp)

    def park(self, work: Work) -> bool:
        """Drop the bytes of a request that waits, unless they are read for its end or its copy, or memory is being
        freed for it.
        """
        queued = work.stage in IN_SCHEDULER and work.stage is not Stage.PARKED
        leaves = work.end_with is not None or work.pass_to is not None
        if not (queued or work.stage is Stage.RETRYING) or leaves or work in self._runs.waiters:
            return False
        if work.body is not None:
            self._budget.drop_body(work.klass, work.lane, work.size_bytes)
            work.body = None
        if queued:
            lane = self._lanes[work.lane]
            if work.run is not None:
                self._grants.take_from_its_replica(lane, work)
                self._dirty.look_at(lane)
            work.blocked_at = None
            self._registry.transition(work, "park", Stage.PARKED)
            lane.parked[work.klass] += 1
        return True

    def hold_conversation(self, work: Work) -> None:
        """Out of the scheduler, but its conversation waits for it: its next attempt runs in place.

        A turn of another class may be under way: then it holds nothing, and is queued again behind that one.
        """
        if work.stage not in IN_SCHEDULER:
            return
        if self._scheduler.eligible(work):
            self._scheduler.hold(work)
            work.holds_conversation = work.conversation is not None
        else:
            self.unqueue(work)

    def give_back(self, work: Work) -> None:
        if work.lane:
            lane = self._lanes[work.lane]
            held_memory = work in self._runs.waiters or (work.run is not None and work.run.grant is not None)
            if self._grants.leave(lane, work):
                self._dirty.look_at(lane)
            if held_memory:
                self._memory.is_back()
