"""Start is grant: which waiting request of a model gets a slot and tokens of which replica now, and whose prompt is
counted ahead.

A request stays in the scheduler until it is granted, so nothing that does not run stands before something more
urgent. What fits may pass what does not, until the most urgent has waited `RESERVE_AFTER_S` for its room: then room is
kept for it. One that is still being prepared keeps its estimated room, for a moment, against those behind it. A request
belongs to the replica that prepared it; when that has no room and another has, it is prepared there anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.admission import MANY, UNPREPARED, Admission, Refusal
from penstock.processors.core.alone import AloneClaim
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.granting import Grants
from penstock.processors.core.queue.fetching import Fetching
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.states import Stage
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.requests.suspects import set_apart
from penstock.processors.core.requests.work import Work
from penstock.processors.core.rooms import Room, Rooms
from penstock.schemas.topics import CLASSES

RESERVE_AFTER_S = 1.0
PREPARE_PATIENCE_S = 0.25
"""So long room is kept for one whose prompt is being counted."""
WALK = 192
"""So many waiting requests are looked at for one that fits."""

Grant = tuple[Work, Replica]


@dataclass(eq=False)
class Starter:
    """Walks the queue of one model in order, and grants."""

    _scheduler: Scheduler[Work]
    _admission: Admission
    _claim: AloneClaim
    _grants: Grants
    _fetching: Fetching
    _rooms: Rooms
    _statuses: Statuses
    _memory: RunMemory

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
            if claim.is_running or self._may_be_alone(claim.lane or lane, claim.holder, now):
                return self._alone(lane, able, claim.holder, now)
            claim.give_up()  # it has left the queue, or could not start now, or others have waited long for it
        rooms: list[Room] = []
        if len(able) > 1:
            self._move_suspects(able, now)
        for replica in able:
            if replica.exclusive is None:
                rooms.append(Room.of(replica))
            elif not self._admission.is_kept(lane, replica):
                replica.exclusive = None
                rooms.append(Room.of(replica))
            elif (work := self._among_suspects(lane, replica, now)) is not None:
                return work, replica
        return self._in_order(lane, rooms, now) if rooms else None

    # -- whose turn it is

    def _in_order(self, lane: Lane, rooms: list[Room], now: float) -> Grant | None:
        seen: dict[str, int] = dict.fromkeys(CLASSES, 0)
        look_ahead = sum([room.replica.look_ahead for room in rooms]) if len(rooms) > 1 else rooms[0].replica.look_ahead
        waited_for: list[Replica] = []
        """By candidates before this one, among these rooms. Some wait for a replica that is not among them."""
        for walked, work in enumerate(self._scheduler.candidates(lane.name, now)):
            if walked >= WALK:
                return None
            if work.alone or work.group is not None:
                free = rooms if not waited_for else self._empty(rooms, waited_for, work, now)
                if free and self._may_go_apart(lane, free, work, now):
                    return self._apart(lane, free, work, now)
                continue
            seen[work.klass] += 1
            one_room = work.run is None and len(lane.ready) == 1
            room = rooms[0] if one_room else self._rooms.choose(lane, work, rooms, now)
            if room is None:
                seen[work.klass] -= 1  # it waits for another replica, and takes nobody's place on these
                continue
            waited_for.append(room.replica)
            first, ahead = seen[work.klass] == 1, seen[work.klass] <= look_ahead
            refusal = self._step(lane, work, room, now, may_prepare=ahead, must_fetch=first or room.slots > 0)
            if refusal is None:
                return work, room.replica
            if refusal.device is not None:
                seen[work.klass] -= 1  # it keeps no room, and others are prepared meanwhile
            elif walked == 0 and work.blocked_at is not None and now - work.blocked_at >= RESERVE_AFTER_S:
                rooms.remove(room)  # it is kept for this one
            if all(one.used_up for one in rooms):
                return None
        return None

    def _apart(self, lane: Lane, rooms: list[Room], work: Work, now: float) -> Grant | None:
        """The most urgent must not run beside others: they wait until it has ended."""
        if work.alone:
            self._claim.take(work, lane, now)
            return self._alone(lane, [room.replica for room in rooms], work, now)
        able = [room for room in rooms if self._memory.fits_ever(room.replica, work)] or rooms
        min(able, key=lambda room: len(room.replica.holders)).replica.exclusive = work.group
        lane.look_due = True  # they come first on it from now on, then who is for the other replicas
        return self._next(lane, now)

    def _empty(self, rooms: list[Room], waited_for: list[Replica], work: Work, now: float) -> list[Room]:
        """Where a suspect can run now and takes nothing from those before it. One that must run alone waits."""
        return [
            room
            for room in rooms
            if not work.alone
            and not room.replica.holders
            and room.replica not in waited_for
            and self._memory.is_free(room.replica, work, now)
        ]

    def _may_go_apart(self, lane: Lane, rooms: list[Room], work: Work, now: float) -> bool:
        if work.alone:
            return self._may_be_alone(lane, work, now)
        kept = next((one for one in lane.ready if one.exclusive is work.group), None)
        if kept is None:
            return True
        # Its group fills the replica that is kept for it: it need not wait for them beside an empty one.
        empty = [room.replica for room in rooms if not room.replica.holders]
        leaves = kept.free_slots <= 0 and any(self._memory.is_free(one, work, now) for one in empty)
        if leaves:
            set_apart(work)
        return leaves

    def _may_be_alone(self, lane: Lane, work: Work, now: float) -> bool:
        """Whether all others must wait for it: only while nothing but them keeps it from starting, and not for long.

        `lane` is its own. What it waits for else (its model, a slot, memory, a busy server, an order) may be long.
        """
        if not self._claim.is_due(work, now) or self._admission.of_queue(lane, work) is not None:
            return False
        replica = self._replica_for(lane, lane.ready, work)
        if now < replica.busy_until or replica.free_slots <= 0:
            return False
        return not (self._startable(replica, work) and self._lacks_memory(lane, replica, work, now))

    def _lacks_memory(self, lane: Lane, replica: Replica, work: Work, now: float) -> bool:
        refusal = self._admission.on(replica, work, 1, MANY, now)
        if refusal is not None:
            self._memory.lacks(lane, replica, work, refusal.device)
        return refusal is not None

    def _replica_for(self, lane: Lane, able: list[Replica], work: Work) -> Replica:
        head = self._memory.heads.get(work)
        if head is not None and head.replica in able:
            return head.replica
        return lane.replica_of(work) or min(able, key=lambda one: len(one.holders))

    def _alone(self, lane: Lane, able: list[Replica], work: Work, now: float) -> Grant | None:
        if not self._admission.is_waiting(lane, work):
            return None
        replica = self._replica_for(lane, able, work)
        if replica not in able:
            return None
        if self._step(lane, work, Room(replica, 1, MANY), now, may_prepare=True) is not None or self._grants.held:
            return None
        return (work, replica) if Room.of(replica).fits(work) else None

    def _among_suspects(self, lane: Lane, replica: Replica, now: float) -> Work | None:
        """Suspects start when all others have left the replica; then nobody else does until they have ended."""
        group = replica.exclusive
        if group is None:
            return None
        others = any(holder.group is not group for holder in replica.holders)
        room = Room.of(replica)
        for work in sorted(group.members, key=lambda member: member.seq):
            if not self._admission.may_join(lane, work):
                continue
            if work.stage is Stage.READY and lane.replica_of(work) is not replica:
                self._grants.take_from_its_replica(lane, work)
            if self._step(lane, work, room, now, may_prepare=True) is None and not others:
                return work
        return None

    def _move_suspects(self, able: list[Replica], now: float) -> None:
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

    # -- one candidate

    @staticmethod
    def _startable(replica: Replica, work: Work) -> bool:
        return work.stage is Stage.READY or (work.stage is Stage.QUEUED and replica.inline and work.line is None)

    def _step(
        self, lane: Lane, work: Work, room: Room, now: float, *, may_prepare: bool, must_fetch: bool = True
    ) -> Refusal | None:
        """None when it can start now; else what can be done for it ahead is done, and its room is set aside."""
        replica = room.replica
        if self._startable(replica, work):
            refusal = self._admission.on(replica, work, room.slots, room.tokens, now)
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
            self._fetching.fetch(lane, work.klass, at_least_one=must_fetch)
        elif work.stage is Stage.QUEUED:
            if not may_prepare:
                return UNPREPARED
            self._grants.prepare(replica, work, now)
        if work.run is None or now - work.run.preparing_since < PREPARE_PATIENCE_S:
            room.set_aside(work.cost)
        return UNPREPARED
