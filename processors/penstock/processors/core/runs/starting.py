"""Start is grant: which waiting request of a model gets a slot and tokens of which replica now, and whose prompt is
counted ahead.

A request stays in the scheduler until it is granted, so nothing that does not run precedes something more
urgent. What fits may pass what does not, until the most urgent has waited `RESERVE_AFTER_S` for its room: then room is
kept for it. One that is still being prepared keeps its estimated room, for a moment, against those behind it. A request
belongs to the replica that prepared it; when that has no room and another has, it is prepared there again.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.fleet.alone import AloneClaim
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.admission import Admission
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.runs.fetching import Fetching
from penstock.processors.core.runs.preparing import Preparing
from penstock.processors.core.runs.replica_choice import FreeCapacity, ReplicaChoice
from penstock.processors.core.runs.suspect_starts import Grant, SuspectStarts
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.topics import CLASSES

RESERVE_AFTER_S = 1.0
WALK = 192
"""How many waiting requests are looked at for one that fits."""


@dataclass(eq=False)
class Starter:
    """Walks the queue of one model in order, and grants."""

    _scheduler: Scheduler[Work]
    _admission: Admission
    _claim: AloneClaim
    _grants: Grants
    _fetching: Fetching
    _replica_choice: ReplicaChoice
    _memory: RunMemory
    _preparing: Preparing
    _suspects: SuspectStarts

    def fill(self, lane: Lane, now: float) -> None:
        """Give out what is free on the model's replicas, and count prompts ahead."""
        ready = lane.ready
        if len(ready) == 1:
            self._scheduler.slack.observe(lane.name, ready[0].slots, ready[0].tokens, now)
        else:
            tokens = [one.tokens for one in ready if one.tokens is not None]
            self._scheduler.slack.observe(lane.name, sum(one.slots for one in ready), sum(tokens) or None, now)
        if lane.look_due:
            self._fetching.ahead(lane)
        while (grant := self._next(lane, now)) is not None:
            self._grants.grant(lane, *grant, now)

    def _next(self, lane: Lane, now: float) -> Grant | None:
        """Who is granted next, and where; None when there is nobody now."""
        look = lane.look_due
        self._memory.walk_begins()
        able = lane.ready
        for replica in able:
            if now < replica.busy_until or (not look and len(replica.holders) >= replica.slots):
                able = [one for one in able if now >= one.busy_until and (look or one.free_slots > 0)]
                break
        if not able:
            return None
        lane.look_due = False
        claim = self._claim
        if claim.holder is not None:
            if claim.is_running or self._suspects.may_be_alone(claim.lane or lane, claim.holder, now):
                return self._suspects.alone(lane, able, claim.holder, now)
            claim.give_up()  # it has left the queue, or could not start now, or others have waited long for it
        capacities: list[FreeCapacity] = []
        if len(able) > 1:
            self._suspects.move(able, now)
        for replica in able:
            if replica.exclusive is None:
                capacities.append(FreeCapacity.of(replica))
            elif not self._admission.is_kept(lane, replica):
                replica.exclusive = None
                capacities.append(FreeCapacity.of(replica))
            elif (work := self._suspects.next_of_group(lane, replica, now)) is not None:
                return work, replica
        return self._in_order(lane, capacities, now) if capacities else None

    # -- whose turn it is

    def _in_order(self, lane: Lane, capacities: list[FreeCapacity], now: float) -> Grant | None:
        seen: dict[str, int] = dict.fromkeys(CLASSES, 0)
        look_ahead = (
            sum([capacity.replica.look_ahead for capacity in capacities])
            if len(capacities) > 1
            else capacities[0].replica.look_ahead
        )
        waited_for: list[Replica] = []
        """By candidates before this one, among these rooms. Some wait for a replica that is not among them."""
        for walked, work in enumerate(self._scheduler.candidates(lane.name, now)):
            if walked >= WALK:
                return None
            if work.alone or work.group is not None:
                free = capacities if not waited_for else self._suspects.empty(capacities, waited_for, work, now)
                if free and self._suspects.may_go_apart(lane, free, work, now):
                    return self._apart(lane, free, work, now)
                continue
            seen[work.klass] += 1
            one_capacity = work.run is None and len(lane.ready) == 1
            capacity = capacities[0] if one_capacity else self._replica_choice.choose(lane, work, capacities, now)
            if capacity is None:
                seen[work.klass] -= 1  # it waits for another replica, and takes nobody's place on these
                continue
            first, ahead = seen[work.klass] == 1, seen[work.klass] <= look_ahead
            refusal = self._preparing.step(
                lane, work, capacity, now, may_prepare=ahead, must_fetch=first or capacity.slots > 0
            )
            if refusal is None:
                return work, capacity.replica
            if work.stage is not Stage.PARKED:  # the bytes of others may keep it from being read: nobody waits for it
                waited_for.append(capacity.replica)
            if refusal.device is not None:
                seen[work.klass] -= 1  # it keeps no room, and others are prepared meanwhile
            elif walked == 0 and work.blocked_at is not None and now - work.blocked_at >= RESERVE_AFTER_S:
                capacities.remove(capacity)  # it is kept for this one
            if all(one.used_up for one in capacities):
                return None
        return None

    def _apart(self, lane: Lane, capacities: list[FreeCapacity], work: Work, now: float) -> Grant | None:
        """The most urgent must not run beside others: they wait until it has ended."""
        if work.alone:
            self._claim.take(work, lane, now)
            return self._suspects.alone(lane, [capacity.replica for capacity in capacities], work, now)
        able = [capacity for capacity in capacities if self._memory.fits_ever(capacity.replica, work)] or capacities
        min(able, key=lambda capacity: len(capacity.replica.holders)).replica.exclusive = work.group
        lane.look_due = True  # they come first on it from now on, then who is for the other replicas
        return self._next(lane, now)
