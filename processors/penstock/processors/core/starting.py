"""Start is grant: which waiting request of a lane gets a slot and its tokens now, and whose prompt is counted ahead.

A request stays in the scheduler until it is granted, so nothing that does not run stands before something more
urgent. What fits may pass what does not, until the most urgent has waited `RESERVE_AFTER_S` for its room: then room is
kept for it. One that is still being prepared keeps its estimated room, for a moment, against those behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.budget import Budget
from penstock.processors.core.effects import Begin, Effect, Fetch, Prepare, Start
from penstock.processors.core.lane import Lane
from penstock.processors.core.scheduler import Scheduler
from penstock.processors.core.states import IN_SCHEDULER, ON_LANE, Stage, check
from penstock.processors.core.statuses import Statuses
from penstock.processors.core.work import Run, Work
from penstock.schemas.topics import CLASSES

RESERVE_AFTER_S = 1.0
PREPARE_PATIENCE_S = 0.25
"""So long room is kept for one whose prompt is being counted."""
WALK = 192
"""So many waiting requests are looked at for one that fits."""
FETCH_AHEAD = 256
"""So many parked requests of a class are read again together, when fewer than half as many have their bytes."""
MANY = 1 << 60
"""Tokens of a lane that has no limit: more than anything needs."""

Go = Callable[[Work, str, Stage], None]


@dataclass(slots=True)
class _Room:
    """What is free while a lane's candidates are walked in order."""

    slots: int
    tokens: int

    def fits(self, need: int) -> bool:
        return self.slots > 0 and need <= self.tokens

    def set_aside(self, need: int) -> None:
        self.slots -= 1
        self.tokens -= need


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
    ) -> None:
        self._scheduler = scheduler
        self._budget = budget
        self._statuses = statuses
        self._emit = emit
        self._transition = go
        self._epoch = epoch
        self._max_execution_s = max_execution_s
        self._ids = itertools.count(1)
        self.alone: Work | None = None
        """It waits for all others to end, or runs by itself: nobody else starts."""
        self.on_lanes = 0
        """Works that hold a grant, over all lanes."""

    def fill(self, lane: Lane, now: float) -> None:
        """Give out what is free on a lane that is up, and count prompts ahead."""
        self._scheduler.observe(lane.name, lane.slots, lane.tokens, now)
        if lane.look_due:
            self._fetch_ahead(lane)
        while (work := self._next(lane, now)) is not None:
            self._grant(lane, work, now)

    def leave(self, lane: Lane, work: Work) -> bool:
        """The work has ended, or must start again: its grant comes back. Whether there is more room than before."""
        known = work in lane.ahead or work is self.alone
        granted = lane.give_back(work)
        if granted:
            self.on_lanes -= 1
            self._scheduler.ended(work)
        if self.alone is work:
            self.alone = None
        return granted or known

    def _next(self, lane: Lane, now: float) -> Work | None:
        """Who is granted next; None when there is nobody now."""
        if now < lane.busy_until or (lane.free_slots <= 0 and not lane.look_due):
            return None
        lane.look_due = False
        alone = self.alone
        if alone is not None and (alone.stage in ON_LANE or self._scheduler.eligible(alone)):
            return self._alone(lane, alone, now)
        self.alone = None  # it has left the queue, or another turn of its conversation is before it now
        if lane.exclusive is not None and not self._still_exclusive(lane):
            lane.exclusive = None
        return self._in_order(lane, now) if lane.exclusive is None else self._among_suspects(lane, now)

    # -- whose turn it is

    def _in_order(self, lane: Lane, now: float) -> Work | None:
        room = self._room(lane)
        seen: dict[str, int] = dict.fromkeys(CLASSES, 0)
        for walked, work in enumerate(self._scheduler.candidates(lane.name, now)):
            if walked >= WALK:
                return None
            seen[work.klass] += 1
            if work.alone or work.group is not None:
                if walked == 0:
                    return self._apart(lane, work, now)
                continue
            first, ahead = seen[work.klass] == 1, seen[work.klass] <= lane.look_ahead
            if self._step(lane, work, room, now, may_prepare=ahead, must_fetch=first):
                return work
            if walked == 0 and work.blocked_at is not None and now - work.blocked_at >= RESERVE_AFTER_S:
                return None  # room is kept for it
            if room.slots <= 0 and (lane.inline or len(lane.ahead) >= lane.look_ahead):
                return None
        return None

    def _apart(self, lane: Lane, work: Work, now: float) -> Work | None:
        """The most urgent must not run beside others: they wait until it has ended."""
        if work.alone:
            self.alone = work
            return self._alone(lane, work, now)
        lane.exclusive = work.group
        return self._among_suspects(lane, now)

    def _alone(self, lane: Lane, work: Work, now: float) -> Work | None:
        if not self._eligible(lane, work):
            return None
        ready = self._step(lane, work, _Room(1, MANY), now, may_prepare=True)
        return work if ready and self.on_lanes == 0 and self._room(lane).fits(_need(work)) else None

    @staticmethod
    def _room(lane: Lane) -> _Room:
        tokens = lane.free_tokens
        return _Room(lane.free_slots, MANY if tokens is None else tokens)

    def _among_suspects(self, lane: Lane, now: float) -> Work | None:
        """Suspects start when all others have left the lane; then nobody else does until they have ended."""
        group = lane.exclusive
        if group is None:
            return None
        others = any(holder.group is not group for holder in lane.holders)
        room = self._room(lane)
        for work in sorted(group.members, key=lambda member: member.seq):
            if self._may_join(lane, work) and self._step(lane, work, room, now, may_prepare=True) and not others:
                return work
        return None

    def _still_exclusive(self, lane: Lane) -> bool:
        group = lane.exclusive
        return group is not None and any(work in lane.holders or self._may_join(lane, work) for work in group.members)

    def _may_join(self, lane: Lane, work: Work) -> bool:
        """Suspects of a group run together, but for one that must run beside nobody: its turn comes by itself."""
        return not work.alone and self._eligible(lane, work)

    def _eligible(self, lane: Lane, work: Work) -> bool:
        return work.stage in IN_SCHEDULER and work.lane == lane.name and self._scheduler.eligible(work)

    # -- one candidate

    def _startable(self, lane: Lane, work: Work) -> bool:
        return work.stage is Stage.READY or (work.stage is Stage.QUEUED and lane.inline and work.line is None)

    def _step(
        self, lane: Lane, work: Work, room: _Room, now: float, *, may_prepare: bool, must_fetch: bool = True
    ) -> bool:
        """True when it can start now; else what can be done for it ahead is done, and its room is set aside."""
        if self._startable(lane, work):
            if room.fits(_need(work)):
                return True
            if lane.tokens is not None and _need(work) > lane.tokens - lane.used_tokens:
                work.blocked_at = now if work.blocked_at is None else work.blocked_at
                self._statuses.say(work, "waiting_for_memory", now)
            return False
        if work.stage is Stage.PARKED:
            self._fetch(lane, work.klass, at_least_one=must_fetch)
        elif work.stage is Stage.QUEUED:
            if not may_prepare:
                return False
            self._prepare(lane, work, now)
        if work.run is None or now - work.run.preparing_since < PREPARE_PATIENCE_S:
            room.set_aside(work.cost)
        return False

    def _prepare(self, lane: Lane, work: Work, now: float) -> None:
        """Have its prompt counted."""
        self._new_run(work, now)
        lane.ahead[work] = None
        self._transition(work, "prepare", Stage.PREPARING)
        assert work.run is not None
        self._emit(Prepare(work, work.run.run_id))

    def _new_run(self, work: Work, now: float) -> Run:
        work.epoch = self._epoch()
        work.run = Run(run_id=f"{work.request_id}#{work.epoch}.{work.attempt}.{next(self._ids)}", preparing_since=now)
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

    def _grant(self, lane: Lane, work: Work, now: float) -> None:
        run = work.run if work.run is not None and work.stage is Stage.READY else self._new_run(work, now)
        self._scheduler.start(work, now, run.need_tokens)
        work.holds_line = work.line is not None
        lane.take(work, run.need_tokens)
        self.on_lanes += 1
        run.granted_at = now
        work.blocked_at = None
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
