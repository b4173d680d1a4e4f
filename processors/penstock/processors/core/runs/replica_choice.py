"""What is free on a model's replicas while its queue is walked, and on which of them a request is prepared or runs."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.requests.admission import MANY, Admission
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work

MOVE_EACH_S = 1.0
"""How often, at most, what lacks memory on one replica is prepared again where another has it."""


@dataclass(slots=True)
class FreeCapacity:
    """Slots and tokens of a replica that are kept for nobody who is before."""

    replica: Replica
    slots: int
    tokens: int

    @classmethod
    def of(cls, replica: Replica) -> FreeCapacity:
        tokens = replica.free_tokens
        return cls(replica, replica.free_slots, MANY if tokens is None else tokens)

    def fits(self, work: Work) -> bool:
        need = 0 if work.run is None else work.run.need_tokens
        return self.slots > 0 and need <= self.tokens

    def set_aside(self, need: int) -> None:
        self.slots -= 1
        self.tokens -= need

    @property
    def used_up(self) -> bool:
        """Neither can anything start, nor is anything more to be prepared."""
        replica = self.replica
        return self.slots <= 0 and (replica.inline or len(replica.ahead) >= replica.look_ahead)

    @property
    def emptiness(self) -> int:
        return self.slots - len(self.replica.ahead)


@dataclass(eq=False)
class ReplicaChoice:
    """Chooses a replica. `affinity_s`: so long a turn waits for the one that has its conversation's beginning."""

    _admission: Admission
    _grants: Grants
    _memory: RunMemory
    _affinity_s: float

    def choose(self, lane: Lane, work: Work, capacities: list[FreeCapacity], now: float) -> FreeCapacity | None:
        """Where it is prepared or runs: the replica that has prepared it, or its conversation's, or the emptiest."""
        run = work.run
        if run is not None:
            return self._of_prepared(lane, work, run.replica, capacities, now)
        if len(lane.ready) > 1 and work.conversation is not None:
            known = lane.with_prefix(work.conversation)
            if known is not None:
                work.held_off_at = now if work.held_off_at is None else work.held_off_at
                if now - work.held_off_at < self._affinity_s:
                    return next((capacity for capacity in capacities if capacity.replica is known), None)
        return capacities[0] if len(capacities) == 1 else self._best(work, capacities, now)

    def _of_prepared(
        self, lane: Lane, work: Work, number: int, capacities: list[FreeCapacity], now: float
    ) -> FreeCapacity | None:
        """Its own, unless that cannot take it and another can: then it is prepared again there."""
        own = next((capacity for capacity in capacities if capacity.replica.number == number), None)
        if work.stage is not Stage.READY or (own is not None and self._takes(own, work, now)):
            return own
        if own is not None and own.fits(work) and work.moved_at is not None and now - work.moved_at < MOVE_EACH_S:
            return own  # it lacks memory there, and was moved for that a moment ago
        other = max(
            (capacity for capacity in capacities if self._takes(capacity, work, now)),
            key=lambda capacity: capacity.emptiness,
            default=None,
        )
        if other is None:
            return own if own is None else self._where_it_waits(lane, work, own, capacities)
        work.moved_at = now
        self._grants.take_from_its_replica(lane, work)
        return other

    def _where_it_waits(
        self, lane: Lane, work: Work, own: FreeCapacity, capacities: list[FreeCapacity]
    ) -> FreeCapacity | None:
        """Its own replica; if the cache there is too small for it, the emptiest whose cache is not."""
        need = 0 if work.run is None else work.run.need_tokens
        if own.replica.could_hold(need):
            return own
        larger = [capacity for capacity in capacities if capacity.replica.could_hold(need)]
        if larger:
            return max(larger, key=lambda capacity: capacity.emptiness)
        if not any(one.could_hold(need) for one in lane.ready):  # there was one: counted again, it is refused
            self._grants.take_from_its_replica(lane, work)
            return own
        return None

    def _takes(self, capacity: FreeCapacity, work: Work, now: float) -> bool:
        return self._admission.on(capacity.replica, work, capacity.slots, capacity.tokens, now) is None

    def _best(self, work: Work, capacities: list[FreeCapacity], now: float) -> FreeCapacity:
        """The emptiest of those that have the memory for it; else of those where it waits, or that could have it."""
        free = [capacity for capacity in capacities if self._memory.is_free(capacity.replica, work, now)]
        waiter = self._memory.waiters.get(work)
        if not free and waiter is not None:
            free = [capacity for capacity in capacities if capacity.replica is waiter.replica]
        if not free:
            free = [capacity for capacity in capacities if self._memory.fits_ever(capacity.replica, work)]
        return max(free or capacities, key=lambda capacity: (capacity.slots > 0, capacity.emptiness))
