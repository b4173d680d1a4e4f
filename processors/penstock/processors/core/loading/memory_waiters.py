"""Of the runs that wait for memory of a device, the first: room is made and kept for that one, and for no other.

What it owns while it waits (reservation, drained replicas) comes back at once when it runs, ends or moves. Those who
wait behind it own nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.processors.core.fleet import views as plan
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lane, Lanes, RunWant
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.fleet.run_memory import MemoryWaiter, RunMemory, run_bytes, waiter_owner
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.admission import Admission
from penstock.processors.core.work.work import Work
from penstock.schemas.topics import CLASSES

FRONT = 8
"""Of a class, among which the oldest is looked for."""


@dataclass(eq=False)
class MemoryWaiters:
    """Chosen again before each planning from those that wait; one that was chosen stays so within its age."""

    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _ledger: Ledger
    _admission: Admission
    _memory: RunMemory
    _dirty: DirtySet
    _settings: plan.PlacementSettings
    reserved_for: set[str] = field(init=False, default_factory=set[str])
    """Models and runs that the ledger keeps room for."""
    _ended_at: dict[str, float] = field(init=False, default_factory=dict[str, float])
    """By device, when the newest that room was kept for got it or stopped waiting."""

    def choose(self, now: float) -> None:
        """By device, the run that is first to get memory."""
        memory = self._memory
        before = {waiter.device: waiter for waiter in memory.waiters.values()}
        waiting: dict[str, list[MemoryWaiter]] = {}
        for want in self._run_wants(now):
            waiting.setdefault(want.device, []).append(self._as_waiter(want, now))
        chosen: dict[str, MemoryWaiter] = {}
        for device, waiters in waiting.items():
            known = before.get(device)
            chosen[device] = min(waiters, key=lambda waiter: self._waiter_order(waiter, known, now))
        for device, waiter in before.items():
            if chosen.get(device) is None or chosen[device].work is not waiter.work:
                self._waiter_leaves(waiter, now)
        memory.waiters = {waiter.work: waiter for waiter in chosen.values()}
        for waiter in chosen.values():
            waiter.work.first_waiter_since = waiter.since
        memory.waiter_left = False

    def misplaced(self, now: float) -> Iterator[RunWant]:
        """Runs that the device on which they wait can never hold beside their replica."""
        yield from [want for want in self._run_wants(now) if not self._memory.fits_ever(want.replica, want.work)]

    def _run_wants(self, now: float) -> Iterator[RunWant]:
        """Runs that could start but for memory: those chosen before, and the first of each model and device."""
        seen: set[Work] = set()
        for waiter in list(self._memory.waiters.values()):
            if self._waits_for_memory(self._lanes[waiter.work.lane], waiter.replica, waiter.work, now):
                seen.add(waiter.work)
                device = self._memory.short_device(waiter.replica, waiter.work, now) or waiter.device
                yield RunWant(waiter.work, waiter.replica, device, run_bytes(waiter.replica, waiter.work))
        for lane in self._lanes.values():
            for device, want in list(lane.run_wants.items()):
                if not self._waits_for_memory(lane, want.replica, want.work, now):
                    del lane.run_wants[device]
                elif want.work not in seen:
                    seen.add(want.work)
                    yield RunWant(want.work, want.replica, device, run_bytes(want.replica, want.work))

    def _waits_for_memory(self, lane: Lane, replica: Replica, work: Work, now: float) -> bool:
        """Whether nothing but memory, and those before it, keeps it from starting on this replica."""
        if replica not in lane.ready or run_bytes(replica, work) <= 0:
            return False
        if work.group is None and self._admission.has_suspects(lane):
            return False  # they come first: for its memory a replica would be given up, and they would take its own
        return self._admission.of_queue(lane, work) is None and self._admission.of_replica(replica, work, now) is None

    def _as_waiter(self, want: RunWant, now: float) -> MemoryWaiter:
        work, device = want.work, want.device
        since = work.first_waiter_since
        if since is None:
            since = max(now if work.blocked_at is None else work.blocked_at, self._ended_at.get(device, float("-inf")))
        klass, oldest = self._stands_for(work)
        return MemoryWaiter(work, want.replica, device, want.need_bytes, waiter_owner(work), klass, oldest, since)

    def _stands_for(self, work: Work) -> tuple[str, float]:
        """The most urgent class that waits for its model, and when the oldest of that came.

        Not its own class: while it is the run with which the model waits (it is the turn of what has waited long, the
        others lack a prompt), nobody else speaks for the others, and models that wait to be loaded take turns for ever.
        """
        demand = self.demand(self._lanes[work.lane])
        for klass in CLASSES[: CLASSES.index(work.klass)]:
            if klass in demand.oldest:
                return klass, demand.oldest[klass]
        return work.klass, min(work.arrived_at, demand.oldest.get(work.klass, work.arrived_at))

    def demand(self, lane: Lane) -> plan.Demand:
        """The classes that wait for a model, and when the oldest near the front of each came."""
        counts: dict[str, int] = {}
        oldest: dict[str, float] = {}
        fronts = self._scheduler.fronts
        for klass in CLASSES:
            waiters = [] if klass in fronts.paused else fronts.ahead(lane.name, klass, FRONT)
            if waiters:
                counts[klass] = fronts.depth(lane.name, klass)
                oldest[klass] = min(work.arrived_at for work in waiters)
        return plan.Demand(counts=counts, oldest=oldest)

    def _waiter_order(
        self, waiter: MemoryWaiter, known: MemoryWaiter | None, now: float
    ) -> tuple[bool, int, bool, float, bool]:
        """Who lets others pass comes last; then by class, but for what has waited very long, then by age.

        Before older ones comes a run on a replica on which nothing has run yet. Else each of two models would be given
        up for a run of the other before a run of its own has had memory. Age goes before who was chosen before, since
        models that are to be loaded wait by age too: a younger one would wait behind them, and nothing would be made
        free for the older run, for which they are given up.
        """
        settings = self._settings
        starved = now - waiter.oldest > settings.aging_s * settings.aged_share
        rank = 0 if starved else CLASSES.index(waiter.klass)
        others = known is None or known.work is not waiter.work
        return settings.lets_pass(now - waiter.since), rank, waiter.replica.runs_begun > 0, waiter.oldest, others

    def _waiter_leaves(self, waiter: MemoryWaiter, now: float) -> None:
        """It has its memory, or does not wait any more: what was kept for it and drained for it is given back."""
        if waiter.owner in self.reserved_for:
            self.reserved_for.discard(waiter.owner)
            self._ledger.cancel_reservations(waiter.owner)
            self._ended_at[waiter.device] = now
        for lane in self._lanes.values():
            if lane.run_wants:
                self._dirty.look_at(lane)

    def views(self) -> list[plan.ModelView]:
        """A run that waits for memory is to placement as a model that waits for it, on one device."""
        return [
            plan.ModelView(
                model=waiter.owner,
                needs={waiter.device: plan.Need(bytes=waiter.need_bytes)},
                load_seconds=0.0,
                demand=plan.Demand(counts={waiter.klass: 1}, oldest={waiter.klass: waiter.oldest}),
                at=(waiter.replica.model, waiter.replica.number),
                waits_since=waiter.since,
            )
            for waiter in self._memory.waiters.values()
        ]

    def lack_memory(self, lane: Lane) -> bool:
        """Whether a run of the model waits for memory that is not free."""
        return any(self.lacks_memory(lane, replica) for replica in lane.ready)

    def lacks_memory(self, lane: Lane, replica: Replica) -> bool:
        return replica.state is ReplicaState.READY and any(
            want.replica is replica and want.need_bytes > self._ledger.free_bytes(device)
            for device, want in lane.run_wants.items()
        )
