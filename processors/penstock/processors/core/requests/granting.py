"""What happens once a request may be prepared or may start: its run is made, it takes its room, effects say so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.processors.core.effects import Begin, CancelRun, Effect, Prepare, Start
from penstock.processors.core.fleet.alone import AloneClaim
from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.work.states import Stage, check
from penstock.processors.core.work.work import Run, Work


@dataclass(eq=False)
class Grants:
    """Slots, tokens and memory that works hold. Decides nothing."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _statuses: Statuses
    _memory: RunMemory
    _claim: AloneClaim
    _emit: Callable[[Effect], None]
    _max_execution_s: float
    held: int = field(init=False, default=0)
    """Works that hold a grant, over all lanes."""
    _ids: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))

    def prepare(self, replica: Replica, work: Work, now: float) -> None:
        """Have its prompt counted on this replica."""
        run = self._new_run(replica, work, now)
        replica.ahead[work] = None
        self._registry.transition(work, "prepare", Stage.PREPARING)
        published = work.goes_on_from
        self._emit(
            Prepare(work.subject, run.run_id, replica.number, published, work.may_resume_stream and published is None)
        )

    def take_from_its_replica(self, lane: Lane, work: Work) -> None:
        """It is prepared again elsewhere."""
        replica, run = lane.replica_of(work), work.run
        if run is not None:
            self._emit(CancelRun(lane.name, run.replica, run.run_id))
        if replica is not None:
            replica.give_back(work)
        work.run = None
        self._registry.transition(work, "elsewhere", Stage.QUEUED)

    def grant(self, lane: Lane, work: Work, replica: Replica, now: float) -> None:
        """It leaves the queue and takes its room, which is free."""
        run = work.run if work.run is not None and work.stage is Stage.READY else self._new_run(replica, work, now)
        self._scheduler.start(work, now, run.need_tokens)
        work.holds_conversation = work.conversation is not None
        replica.take(work, run.need_tokens, now)
        if replica.device is not None:
            lane.uses.used(now)
            run.grant = self._memory.grant(replica, work, now)
            self._memory.started(lane, work)
        self.held += 1
        run.granted_at = now
        work.blocked_at = work.held_off_at = work.first_waiter_since = None
        if work.started_at is None:
            work.started_at = now
            work.load_ms = lane.loading_ms(work.arrived_at, now)
        if work.conversation is not None:
            self._registry.transition(work, "grant", Stage.BEGINNING)
            self._emit(Begin(work.subject, run.run_id, run.mark, run.prepared))
        else:
            check(work.stage, "grant", Stage.RUNNING)
            self.run(lane, work, run, "grant", now)

    def run(self, lane: Lane, work: Work, run: Run, event: str, now: float) -> None:
        run.run_at = now
        run.timeout_at = now + self._time_limit_s(work)
        self._registry.transition(work, event, Stage.RUNNING)
        self._statuses.say(work, "running", now)
        replica = lane.replicas.get(run.replica)
        inline = replica is None or replica.inline
        published, work.may_resume_stream = work.goes_on_from if run.prepared is None else None, False
        self._emit(Start(work.subject, run.run_id, run.replica, run.prepared, inline, published))

    def _time_limit_s(self, work: Work) -> float:
        """Of its model, or else of the worker; the request's own can only shorten it."""
        own_ms = None if work.body is None else work.body.request.execution_timeout_ms
        of_model_s = self._lanes[work.lane].spec.max_execution_s
        longest_s = self._max_execution_s if of_model_s is None else of_model_s
        return longest_s if own_ms is None else min(longest_s, own_ms / 1000)

    def leave(self, lane: Lane, work: Work) -> bool:
        """The work has ended, or must start again: its grant comes back. Whether there is more room than before."""
        replica = lane.replica_of(work)
        known = work is self._claim.holder or (replica is not None and work in replica.ahead)
        granted = replica is not None and replica.give_back(work)
        run = work.run
        if run is not None and run.grant is not None:
            self._memory.release(run.grant)
            run.grant = None
        if granted:
            self.held -= 1
            self._scheduler.slack.of(work.lane).ended(work.seq)
        if self._claim.holder is work:
            self._claim.give_up()
        return granted or known

    def _new_run(self, replica: Replica, work: Work, now: float) -> Run:
        work.epoch = self._registry.generation
        run_id = f"{work.request_id}#{work.epoch}.{work.attempt}.{next(self._ids)}"
        work.run = Run(run_id=run_id, replica=replica.number, preparing_since=now)
        return work.run
