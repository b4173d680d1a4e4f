"""What is loaded, drained and unloaded when: placement's decisions carried out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.processors.core.fleet import views as plan
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import UNSERVED, Lane, Lanes, RunWant
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.placement import decide
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.fleet.run_memory import MemoryWaiter, RunMemory, run_bytes
from penstock.processors.core.loading.lane_failures import LaneFailures
from penstock.processors.core.loading.lifecycle import Lifecycle
from penstock.processors.core.loading.memory_waiters import MemoryWaiters
from penstock.processors.core.loading.view_maker import Views
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.runs.starting import Starter
from penstock.processors.core.work.suspects import set_apart
from penstock.processors.core.work.work import Work

STATUSES_A_LOAD = 64
"""At most this many of the requests that wait for a model get a status with the reason."""


@dataclass(eq=False)
class Placing:
    """Views of lanes and replicas go into `placement.decide`; its decisions become effects."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _ledger: Ledger
    _memory: DeviceMemory
    _starter: Starter
    _grants: Grants
    _runs: RunMemory
    _statuses: Statuses
    _waiters: MemoryWaiters
    _views: Views
    _failures: LaneFailures
    _endings: Endings
    _lifecycle: Lifecycle
    _dirty: DirtySet
    _settings: plan.PlacementSettings

    # -- one model

    def fill_or_load(self, lane: Lane, now: float) -> None:
        if lane.name == UNSERVED:
            return
        if (lane.fail_error is not None or not lane.served) and self._failures.end_waiting(lane, now):
            lane.look_due = True
        if self._registry.stalled or lane.paused:
            return
        if lane.ready:
            lane.asked_for = False
            self._starter.fill(lane, now)
            if self._runs.waiter_left:
                self._dirty.plan_soon()
            elif lane.run_wants:
                self._dirty.plan_later(now)
            return
        waited_for = lane.name in self._scheduler.fronts.lanes()
        if not (waited_for or lane.wanted):
            return
        if not lane.spec.devices:
            self._lifecycle.load_weightless(lane, now)
        elif waited_for and lane.never_fits is not None and lane.fail_error is None:
            # A turn of a conversation, whose turn came after that was known.
            self._failures.load_is_hopeless(lane, lane.never_fits)
            lane.look_due = True
        elif lane.size_due:
            self._lifecycle.size(lane, now)
        elif waited_for and not lane.asked_for:
            self._dirty.plan_soon()
        else:
            self._dirty.plan_later(now)
        lane.asked_for = waited_for
        if waited_for:
            status = "waiting_for_memory" if lane.short else "loading_model"
            for work in itertools.islice(self._scheduler.fronts.waiting(lane.name), STATUSES_A_LOAD):
                self._statuses.say(work, status, now)

    def loading_progressed(self, model: str, fraction: float, now: float) -> None:
        """The share of the model's download that is done, from 0 to 1: requests that wait for it get it as a status."""
        for work in itertools.islice(self._scheduler.fronts.waiting(model), STATUSES_A_LOAD):
            self._statuses.say_at_once(work, "loading_model", now, f"loading_model {fraction:.0%}")

    # -- all models together

    def plan(self, now: float) -> None:
        """Ask placement what to do, and do it."""
        self._dirty.planning(now)
        for want in list(self._waiters.misplaced(now)):
            self._put_elsewhere(want, now)
        self._waiters.choose(now)
        waiters = {waiter.owner: waiter for waiter in self._runs.waiters.values()}
        self._undo_needless_drains(waiters)
        self._cancel_needless_reservations(waiters)
        models: list[plan.ModelView] = []
        for lane in self._lanes.values():
            if lane.needs is not None:  # its replicas hold memory also while it is to be sized again
                models.append(self._views.model(lane, now))
            if lane.size_due and lane.spec.devices and self._is_wanted(lane):
                self._lifecycle.size(lane, now)
            self._lifecycle.plan_weightless(lane, now)
        models += self._waiters.views()
        replicas = [
            self._views.replica(lane, replica)
            for lane in self._lanes.values()
            if lane.needs is not None
            for replica in lane.replicas.values()
            if replica.device is not None
        ]
        for decision in decide(now, models, replicas, self._ledger, self._settings):
            self._carry_out(decision, waiters, now)
        for lane in self._lanes.values():
            lane.short = bool(
                lane.needs is not None
                and not lane.size_due
                and not lane.ready
                and not lane.loading
                and not lane.paused
                and now >= lane.not_before
                and self._is_wanted(lane)
                and self._memory.booked(lane)
            )

    def _put_elsewhere(self, want: RunWant, now: float) -> None:
        """It can never run where it waits: on another replica, on another device, or nowhere."""
        work, replica = want.work, want.replica
        lane = self._lanes[work.lane]
        assert replica.device is not None
        # Of what it takes here: only a larger device is better, so that the largest is never taken for too small.
        need = self._runs.own_bytes(replica) + run_bytes(replica, work)
        others = [one for one in self._memory.candidate_devices(lane) if one.device != replica.device]
        if any(self._runs.fits_ever(one, work) for one in lane.ready):
            if work.group is not None and replica.exclusive is work.group:
                set_apart(work)  # it would be prepared there again, for ever; the others of its group keep the replica
            if work.run is not None:
                self._grants.take_from_its_replica(lane, work)
        elif any(need <= one.limit_bytes for one in others):
            lane.too_small.add(replica.device)
            self._lifecycle.drain(lane, replica, "too_small", None)
        else:
            here = [one for one in self._ledger.devices() if one.device == replica.device]
            largest = max([*others, *here], key=lambda one: one.limit_bytes)
            error = self._ledger.insufficient(f"{lane.name} with this run", {largest.device: need})
            if work.run is not None:
                self._grants.take_from_its_replica(lane, work)
            self._endings.end_waiting(work, "lane_failed", error, now)
        self._dirty.look_at(lane)

    def _undo_needless_drains(self, waiters: Mapping[str, MemoryWaiter]) -> None:
        """Nobody waits for the room of what is being drained any more."""
        for lane in self._lanes.values():
            for replica in list(lane.replicas.values()):
                owner = replica.ending_for
                if (
                    replica.state is ReplicaState.DRAINING
                    and owner is not None
                    and not self._still_wants(owner, waiters)
                ):
                    self._lifecycle.undo_drain(lane.name, replica.number)

    def _cancel_needless_reservations(self, waiters: Mapping[str, MemoryWaiter]) -> None:
        for owner in [owner for owner in self._waiters.reserved_for if not self._still_wants(owner, waiters)]:
            self._waiters.reserved_for.discard(owner)
            self._ledger.cancel_reservations(owner)

    def _still_wants(self, owner: str, waiters: Mapping[str, MemoryWaiter]) -> bool:
        """Whether a model, or the run that room is made for, still waits for memory.

        It must agree with placement, or room is made for it and given back at one instant. A paused model is loaded
        if it is pinned or ordered, though nothing of it starts.
        """
        lane = self._lanes.get(owner)
        if lane is None:
            return owner in waiters
        if lane.ready or lane.loading:
            return False
        return lane.is_pinned or lane.desired is True if lane.paused else self._is_wanted(lane)

    def _is_wanted(self, lane: Lane) -> bool:
        return lane.is_pinned or lane.wanted or lane.desired is True or self._waiters.demand(lane).counts != {}

    def _carry_out(self, decision: plan.Decision, waiters: Mapping[str, MemoryWaiter], now: float) -> None:
        waiter = waiters.get(decision.model)
        if isinstance(decision, plan.Reserve):
            if self._ledger.reserve(decision.device, decision.bytes, decision.model, decision.until, now):
                self._waiters.reserved_for.add(decision.model)
            return
        if waiter is not None:
            self._dirty.look_at(self._lanes[waiter.replica.model])  # the memory of its run is free
            return
        lane = self._lanes[decision.model]
        if isinstance(decision, plan.PlannedLoad):
            former = lane.replicas.get(decision.replica)
            if former is not None and former.device is not None:
                return  # it got one in this round already
            # Placement does not see what takes no memory, as the server of a former entry whose runs are to end.
            number = decision.replica if former is None else lane.next_number()
            grant = self._ledger.grant(lane.name, decision.needs, now)
            if grant is not None:
                self._lifecycle.load(lane, Replica(lane.name, number, grant, decision.devices), now)
            return
        replica = lane.replicas.get(decision.replica)
        if replica is None:
            return
        if isinstance(decision, plan.Drain):
            self._lifecycle.drain(lane, replica, decision.reason, decision.for_model)
        else:
            self._lifecycle.unload(lane, replica, decision.reason, decision.for_model)
