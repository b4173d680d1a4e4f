"""Start is grant: which waiting request of a model gets a slot and tokens of which replica now, and whose prompt is
counted ahead.

A request stays in the scheduler until it is granted, so nothing that does not run stands before something more
urgent. What fits may pass what does not, until the most urgent has waited `RESERVE_AFTER_S` for its room: then room is
kept for it. One that is still being prepared keeps its estimated room, for a moment, against those behind it. A request
belongs to the replica that prepared it; when that has no room and another has, it is prepared there anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.effects import Begin, CancelRun, Effect, Fetch, Prepare, Start
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.states import IN_SCHEDULER, ON_LANE, Stage, check
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.requests.work import Run, Work
from penstock.schemas.topics import CLASSES

RESERVE_AFTER_S = 1.0
PREPARE_PATIENCE_S = 0.25
"""So long room is kept for one whose prompt is being counted."""
MOVE_EACH_S = 1.0
"""So often, at most, what lacks memory on one replica is prepared anew where another has it."""
ALONE_CLAIM_S = 60.0
"""So long others wait, at most, for one that must run alone; then they start for as long."""
WALK = 192
"""So many waiting requests are looked at for one that fits."""
FETCH_AHEAD = 256
"""So many parked requests of a class are read again together, when fewer than half as many have their bytes."""
MANY = 1 << 60
"""Tokens of a lane that has no limit: more than anything needs."""

Go = Callable[[Work, str, Stage], None]


@dataclass(slots=True)
class _Room:
    """What is free on a replica while its model's candidates are walked in order."""

    replica: Replica
    slots: int
    tokens: int

    def fits(self, need: int) -> bool:
        return self.slots > 0 and need <= self.tokens

    def set_aside(self, need: int) -> None:
        self.slots -= 1
        self.tokens -= need

    @property
    def used_up(self) -> bool:
        """Neither can anything start, nor is anything more to be prepared."""
        replica = self.replica
        return self.slots <= 0 and (replica.inline or len(replica.ahead) >= replica.look_ahead)


Grant = tuple[Work, Replica]


class Starter:
    """Grants. `emit` takes effects; `go` makes transitions; `epoch` is the group's generation now."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        budget: Budget,
        statuses: Statuses,
        emit: Callable[[Effect], None],
        go: Go,
        epoch: Callable[[], int],
        *,
        max_execution_s: float,
        affinity_s: float,
        memory: RunMemory,
    ) -> None:
        self._scheduler = scheduler
        self._budget = budget
        self._statuses = statuses
        self._emit = emit
        self._transition = go
        self._epoch = epoch
        self._max_execution_s = max_execution_s
        self._affinity_s = affinity_s
        self.memory = memory
        self._ids = itertools.count(1)
        self.alone: Work | None = None
        """It waits for all others to end, or runs by itself: nobody else starts."""
        self._alone_lane: Lane | None = None
        self._alone_since = float("-inf")
        self._no_claim_before = float("-inf")
        self._lacked = False
        """Whether the one that was looked at last could start but for memory."""
        self.on_lanes = 0
        """Works that hold a grant, over all lanes."""

    def fill(self, lane: Lane, now: float) -> None:
        """Give out what is free on the model's replicas, and count prompts ahead."""
        ready = lane.ready
        if len(ready) == 1:
            self._scheduler.observe(lane.name, ready[0].slots, ready[0].tokens, now)
        else:
            tokens = [one.tokens for one in ready if one.tokens is not None]
            self._scheduler.observe(lane.name, sum(one.slots for one in ready), sum(tokens) or None, now)
        if lane.look_due:
            self._fetch_ahead(lane)
        while (grant := self._next(lane, now)) is not None:
            self._grant(lane, *grant, now)

    def leave(self, lane: Lane, work: Work) -> bool:
        """The work has ended, or must start again: its grant comes back. Whether there is more room than before."""
        replica = lane.replica_of(work)
        known = work is self.alone or (replica is not None and work in replica.ahead)
        granted = replica is not None and replica.give_back(work)
        run = work.run
        if run is not None and run.grant is not None:
            self.memory.release(run.grant)
            run.grant = None
        if granted:
            self.on_lanes -= 1
            self._scheduler.ended(work)
        if self.alone is work:
            self.alone = None
        return granted or known

    def _next(self, lane: Lane, now: float) -> Grant | None:
        """Who is granted next, and where; None when there is nobody now."""
        look = lane.look_due
        self.memory.walk_begins()
        able = lane.ready
        for replica in able:
            if now < replica.busy_until or (not look and len(replica.holders) >= replica.slots):
                able = [one for one in able if now >= one.busy_until and (look or one.free_slots > 0)]
                break
        if not able:
            return None
        lane.look_due = False
        alone = self.alone
        if alone is not None:
            if alone.stage in ON_LANE or self._may_be_alone(self._alone_lane or lane, alone, now):
                return self._alone(lane, able, alone, now)
            self.alone = None  # it has left the queue, or could not start now, or others have waited long for it
        rooms: list[_Room] = []
        for replica in able:
            if replica.exclusive is None:
                rooms.append(_room(replica))
            elif not self._still_exclusive(lane, replica):
                replica.exclusive = None
                rooms.append(_room(replica))
            elif (work := self._among_suspects(lane, replica, now)) is not None:
                return work, replica
        return self._in_order(lane, rooms, now) if rooms else None

    # -- whose turn it is

    def _in_order(self, lane: Lane, rooms: list[_Room], now: float) -> Grant | None:
        seen: dict[str, int] = dict.fromkeys(CLASSES, 0)
        look_ahead = sum([room.replica.look_ahead for room in rooms]) if len(rooms) > 1 else rooms[0].replica.look_ahead
        for walked, work in enumerate(self._scheduler.candidates(lane.name, now)):
            if walked >= WALK:
                return None
            seen[work.klass] += 1
            if work.alone or work.group is not None:
                if walked == 0 and not _has_its_replica(lane, work) and self._may_go_apart(lane, work, now):
                    return self._apart(lane, rooms, work, now)
                continue
            room = rooms[0] if work.run is None and len(lane.ready) == 1 else self._room_for(lane, work, rooms, now)
            if room is None:
                continue
            first, ahead = seen[work.klass] == 1, seen[work.klass] <= look_ahead
            if self._step(lane, work, room, now, may_prepare=ahead, must_fetch=first):
                return work, room.replica
            if self._lacked:
                seen[work.klass] -= 1  # it keeps no room, and others are prepared meanwhile
            elif walked == 0 and work.blocked_at is not None and now - work.blocked_at >= RESERVE_AFTER_S:
                rooms.remove(room)  # it is kept for this one
            if all(one.used_up for one in rooms):
                return None
        return None

    def _room_for(self, lane: Lane, work: Work, rooms: list[_Room], now: float) -> _Room | None:
        """Where it is prepared or runs: the replica that has prepared it, or its conversation's, or the emptiest."""
        run = work.run
        if run is not None:
            own = next((room for room in rooms if room.replica.number == run.replica), None)
            if work.stage is not Stage.READY or (own is not None and self._takes(own, work, now)):
                return own
            if own is not None and own.fits(run.need_tokens) and not self._may_move(work, now):
                return own  # it lacks memory there, and was moved for that a moment ago
            other = max((room for room in rooms if self._takes(room, work, now)), key=_emptiness, default=None)
            if other is not None:
                work.moved_at = now
                self.take_from_its_replica(lane, work)
            return own if other is None else other
        if len(lane.ready) > 1 and work.line is not None:
            known = lane.with_prefix(work.line)
            if known is not None:
                work.held_off_at = now if work.held_off_at is None else work.held_off_at
                if now - work.held_off_at < self._affinity_s:
                    return next((room for room in rooms if room.replica is known), None)
        return rooms[0] if len(rooms) == 1 else self._best_room(work, rooms, now)

    def _best_room(self, work: Work, rooms: list[_Room], now: float) -> _Room:
        """The emptiest of those that have the memory for it; else of those where it waits, or that could have it."""
        free = [room for room in rooms if self.memory.is_free(room.replica, work, now)]
        head = self.memory.heads.get(work)
        if not free and head is not None:
            free = [room for room in rooms if room.replica is head.replica]
        if not free:
            free = [room for room in rooms if self.memory.fits_ever(room.replica, work)]
        return max(free or rooms, key=lambda room: (room.slots > 0, _emptiness(room)))

    def _takes(self, room: _Room, work: Work, now: float) -> bool:
        return room.fits(_need(work)) and self.memory.is_free(room.replica, work, now)

    @staticmethod
    def _may_move(work: Work, now: float) -> bool:
        return work.moved_at is None or now - work.moved_at >= MOVE_EACH_S

    def take_from_its_replica(self, lane: Lane, work: Work) -> None:
        """It is prepared anew elsewhere."""
        replica, run = lane.replica_of(work), work.run
        if run is not None:
            self._emit(CancelRun(lane.name, run.replica, run.run_id))
        if replica is not None:
            replica.give_back(work)
        work.run = None
        self._transition(work, "elsewhere", Stage.QUEUED)

    def _apart(self, lane: Lane, rooms: list[_Room], work: Work, now: float) -> Grant | None:
        """The most urgent must not run beside others: they wait until it has ended."""
        if work.alone:
            self.alone, self._alone_lane, self._alone_since = work, lane, now
            return self._alone(lane, [room.replica for room in rooms], work, now)
        able = [room for room in rooms if self.memory.fits_ever(room.replica, work)] or rooms
        min(able, key=lambda room: len(room.replica.holders)).replica.exclusive = work.group
        return self._next_again(lane, now)

    def _next_again(self, lane: Lane, now: float) -> Grant | None:
        """A replica is for suspects only from now on: they come first, then who is for the others."""
        lane.look_due = True
        return self._next(lane, now)

    def _may_go_apart(self, lane: Lane, work: Work, now: float) -> bool:
        return not work.alone or self._may_be_alone(lane, work, now)

    def _may_be_alone(self, lane: Lane, work: Work, now: float) -> bool:
        """Whether all others must wait for it: only while nothing but them keeps it from starting, and not for long.

        `lane` is its own. What it waits for else (its model, memory, a busy server, an order) may take very long.
        """
        if now - self._alone_since >= ALONE_CLAIM_S and self.alone is work:
            self._no_claim_before = now + ALONE_CLAIM_S
        if now < self._no_claim_before or not self._scheduler.eligible(work):
            return False
        if not lane.ready or lane.paused or work.klass in self._scheduler.paused:
            return False
        replica = self._replica_for(lane, lane.ready, work)
        if now < replica.busy_until:
            return False
        return not (self._startable(replica, work) and self.memory.is_lacking(lane, replica, work, now))

    def _replica_for(self, lane: Lane, able: list[Replica], work: Work) -> Replica:
        head = self.memory.heads.get(work)
        if head is not None and head.replica in able:
            return head.replica
        return lane.replica_of(work) or min(able, key=lambda one: len(one.holders))

    def _alone(self, lane: Lane, able: list[Replica], work: Work, now: float) -> Grant | None:
        if not self._eligible(lane, work):
            return None
        replica = self._replica_for(lane, able, work)
        if replica not in able:
            return None
        ready = self._step(lane, work, _Room(replica, 1, MANY), now, may_prepare=True)
        return (work, replica) if ready and self.on_lanes == 0 and _room(replica).fits(_need(work)) else None

    def _among_suspects(self, lane: Lane, replica: Replica, now: float) -> Work | None:
        """Suspects start when all others have left the replica; then nobody else does until they have ended."""
        group = replica.exclusive
        if group is None:
            return None
        others = any(holder.group is not group for holder in replica.holders)
        room = _room(replica)
        for work in sorted(group.members, key=lambda member: member.seq):
            if not self._may_join(lane, work):
                continue
            if work.stage is Stage.READY and lane.replica_of(work) is not replica:
                self.take_from_its_replica(lane, work)
            if self._step(lane, work, room, now, may_prepare=True) and not others:
                return work
        return None

    def has_suspects(self, lane: Lane) -> bool:
        """Whether a replica of the model is kept for suspects, of whom one waits to run there or runs."""
        return any(replica.exclusive is not None and self._still_exclusive(lane, replica) for replica in lane.ready)

    def _still_exclusive(self, lane: Lane, replica: Replica) -> bool:
        group = replica.exclusive
        return group is not None and any(
            work in replica.holders or self._may_join(lane, work) for work in group.members
        )

    def _may_join(self, lane: Lane, work: Work) -> bool:
        """Suspects of a group run together, but for one that must run beside nobody: its turn comes by itself."""
        return not work.alone and self._eligible(lane, work)

    def _eligible(self, lane: Lane, work: Work) -> bool:
        return work.stage in IN_SCHEDULER and work.lane == lane.name and self._scheduler.eligible(work)

    # -- one candidate

    def _startable(self, replica: Replica, work: Work) -> bool:
        return work.stage is Stage.READY or (work.stage is Stage.QUEUED and replica.inline and work.line is None)

    def _step(
        self, lane: Lane, work: Work, room: _Room, now: float, *, may_prepare: bool, must_fetch: bool = True
    ) -> bool:
        """True when it can start now; else what can be done for it ahead is done, and its room is set aside."""
        replica = room.replica
        self._lacked = False
        if self._startable(replica, work):
            if room.fits(_need(work)):
                if replica.device is None or not self.memory.is_lacking(lane, replica, work, now):
                    return True
                self._lacked = True
            elif replica.tokens is None or _need(work) <= replica.tokens - replica.used_tokens:
                return False
            work.blocked_at = now if work.blocked_at is None else work.blocked_at
            self._statuses.say(work, "waiting_for_memory", now)
            return False
        if work.stage is Stage.PARKED:
            self._fetch(lane, work.klass, at_least_one=must_fetch)
        elif work.stage is Stage.QUEUED:
            if not may_prepare:
                return False
            self._prepare(replica, work, now)
        if work.run is None or now - work.run.preparing_since < PREPARE_PATIENCE_S:
            room.set_aside(work.cost)
        return False

    def _prepare(self, replica: Replica, work: Work, now: float) -> None:
        """Have its prompt counted."""
        run = self._new_run(replica, work, now)
        replica.ahead[work] = None
        self._transition(work, "prepare", Stage.PREPARING)
        self._emit(Prepare(work, run.run_id))

    def _new_run(self, replica: Replica, work: Work, now: float) -> Run:
        work.epoch = self._epoch()
        run_id = f"{work.request_id}#{work.epoch}.{work.attempt}.{next(self._ids)}"
        work.run = Run(run_id=run_id, replica=replica.number, preparing_since=now)
        return work.run

    def _fetch_ahead(self, lane: Lane) -> None:
        """Before their turn comes, while few of their class have their bytes."""
        for klass, parked in lane.parked.items():
            if parked and self._scheduler.depth(lane.name, klass) - parked < FETCH_AHEAD // 2:
                self._fetch(lane, klass, at_least_one=False)

    def _fetch(self, lane: Lane, klass: str, *, at_least_one: bool) -> None:
        """Have the bytes of the first parked requests of a class read again, as many as their share has room for."""
        wanted: dict[tuple[str, int], list[int]] = {}
        room = self._budget.room(klass, lane.name)
        for work in self._scheduler.ahead(lane.name, klass, FETCH_AHEAD):
            if work.stage is Stage.FETCHING:
                room -= work.size_bytes
            if work.stage is not Stage.PARKED:
                continue
            room -= work.size_bytes
            if room < 0 and (wanted or not at_least_one):
                break
            self._transition(work, "fetch", Stage.FETCHING)
            lane.parked[klass] -= 1
            wanted.setdefault(work.tp, []).append(work.key[2])
        for tp, offsets in wanted.items():
            self._emit(Fetch(tp, tuple(sorted(offsets)), CLASSES.index(klass)))

    # -- the grant

    def _grant(self, lane: Lane, work: Work, replica: Replica, now: float) -> None:
        run = work.run if work.run is not None and work.stage is Stage.READY else self._new_run(replica, work, now)
        self._scheduler.start(work, now, run.need_tokens)
        work.holds_line = work.line is not None
        replica.take(work, run.need_tokens, now)
        if replica.device is not None:
            lane.uses.used(now)
            run.grant = self.memory.grant(replica, work, now)
            self.memory.started(lane, work)
        self.on_lanes += 1
        run.granted_at = now
        work.blocked_at = work.held_off_at = work.head_since = None
        if work.started_at is None:
            work.started_at = now
            work.load_ms = lane.loading_ms(work.arrived_at, now)
        if work.line is not None:
            self._transition(work, "grant", Stage.BEGINNING)
            self._emit(Begin(work, run.run_id))
        else:
            check(work.stage, "grant", Stage.RUNNING)
            self.run(work, run, "grant", now)

    def run(self, work: Work, run: Run, event: str, now: float) -> None:
        """It goes to its engine."""
        run.run_at = now
        run.timeout_at = now + self.time_limit_s(work)
        self._transition(work, event, Stage.RUNNING)
        self._statuses.say(work, "running", now)
        self._emit(Start(work, run.run_id))

    def time_limit_s(self, work: Work) -> float:
        own_ms = None if work.body is None else work.body.request.execution_timeout_ms
        return self._max_execution_s if own_ms is None else min(self._max_execution_s, own_ms / 1000)


def _need(work: Work) -> int:
    """Tokens of the engine's cache that it is known to need."""
    return 0 if work.run is None else work.run.need_tokens


def _room(replica: Replica) -> _Room:
    tokens = replica.free_tokens
    return _Room(replica, replica.free_slots, MANY if tokens is None else tokens)


def _emptiness(room: _Room) -> int:
    return room.slots - len(room.replica.ahead)


def _has_its_replica(lane: Lane, work: Work) -> bool:
    """Whether a replica is for its group of suspects only, already."""
    return not work.alone and any(one.exclusive is work.group for one in lane.ready)
