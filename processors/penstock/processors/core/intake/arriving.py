"""Records as they are delivered, and those that were parked and are read again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.effects import Effect, Republish
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.intake.arrivals import Poison, Taken
from penstock.processors.core.intake.queueing import Queueing
from penstock.processors.core.intake.screening import Screening
from penstock.processors.core.intake.start_times import StartTimes
from penstock.processors.core.intake.unserved import UnservedRequests
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.lifetimes import Lifetimes
from penstock.processors.core.requests.explaining import Explainer
from penstock.processors.core.requests.histories import Histories
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Body, Work, WorkKey
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, InternalError
from penstock.schemas.image_payloads import image_references
from penstock.schemas.labels import labels_of

MOST_REPEATS = 16
"""How many repeats of a request have outcomes of their own."""


@dataclass(eq=False)
class Arrivals:
    """What a record is to this worker: new work, a repeat, poison, or one that belongs on another partition."""

    _registry: Registry
    _budget: Budget
    _lanes: Lanes
    _screening: Screening
    _unserved: UnservedRequests
    _queueing: Queueing
    _start_times: StartTimes
    _explainer: Explainer
    _lifetimes: Lifetimes
    _holdings: Holdings
    _histories: Histories
    _endings: Endings
    _dirty: DirtySet
    _emit: Callable[[Effect], None]

    def arrived(self, key: WorkKey, read: Taken | Poison, body: Body, now: float, wall_ms: int) -> Work:
        """A new record. Returns its work."""
        if (former := self._registry.works.get(key)) is not None:  # of a topic that was deleted and created again since
            self._holdings.drop(former)
        if isinstance(read, Poison):
            return self._poison(key, read, body, now)
        work = self._hold(key, read, body, now, wall_ms)
        if read.moves:
            self._registry.transition(work, "arrive_elsewhere", Stage.MOVING)
            self._emit(Republish(work.subject, read.belongs_on, read.origin, read.pool))
            return work
        self._registry.name(work)
        error = read.error or self._screening.screen(work, read, wall_ms)
        if error is None and work.unserved is not None and self._unserved.pass_on_arrival(work):
            return work
        if isinstance(error, InsufficientCapacity) and self._unserved.pass_on_unloadable(work):
            return work
        starts_later = work.start_after_ms is not None and work.start_after_ms > wall_ms
        if error is None and starts_later:
            error = self._start_times.refusal(work)
        if error is None and starts_later:
            self._start_times.hold(work, now)
        elif error is None:
            self._queueing.join(work, "arrive", now)
        elif read.error is None and not isinstance(error, EngineFailed):
            # Also of what is not served any more: an earlier worker may have answered it.
            self._endings.end(work, "arrive_ended", error, now)
        elif isinstance(error, EngineFailed):  # what two workers died of is not tried again
            self._endings.letter(work, "arrive_poison", error)
        else:
            self._endings.settle(work, "arrive_ended", now, error=error)
        return work

    def repeated(self, read: Taken | Poison) -> None:
        """The request that is held has another record here. An earlier worker may have published under this origin.

        What came since this worker owns the partition was published by nobody: that repeat ends silently. If the
        request is passed on, each repeat gets a copy: the outcome will come from another worker.
        """
        work = None if isinstance(read, Poison) else self._registry.find(read.request.tenant, read.request.request_id)
        if work is None:
            return
        known = (work.first_place, *work.repeats, *work.silent_repeats)
        if read.origin not in known and len(known) <= MOST_REPEATS:
            passed = work.unserved is not None or work.pass_to is not None
            silent = read.origin.append_time_ms >= self._registry.owned_since_ms and not passed
            (work.silent_repeats if silent else work.repeats).append(read.origin)

    def _poison(self, key: WorkKey, poison: Poison, body: Body, now: float) -> Work:
        work = Work(
            key=key,
            request_id=body.request.request_id,
            tenant=body.request.tenant,
            task=body.request.task,
            arrived_at=now,
            seq=self._registry.next_seq(),
            attempt=poison.attempt,
            max_attempts=1,
            epoch=self._registry.generation,
            first_place=poison.origin,
            body=body,
            labels=poison.labels.with_key(body.headers),
            size_bytes=len(body.value),
        )
        self._registry.hold(work)
        self._endings.letter(work, "arrive_poison", poison.reason)
        return work

    def _hold(self, key: WorkKey, read: Taken, body: Body, now: float, wall_ms: int) -> Work:
        request = read.request
        self._explainer.clock(now, wall_ms)
        ttl_ms = None if read.names_deadline else self._lifetimes.choose_ms(read.klass)
        deadline_ms = read.deadline_ms if ttl_ms is None else read.origin.append_time_ms + ttl_ms
        deadline = None if deadline_ms is None else now + (deadline_ms - wall_ms) / 1000
        work = Work(
            key=key,
            request_id=request.request_id,
            tenant=request.tenant,
            task=request.task,
            klass=read.klass,
            priority=request.priority,
            conversation=read.conversation,
            names_pool=request.pool is not None,
            conversation_id=request.conversation_id,
            deadline_ms=deadline_ms,
            deadline=deadline,
            start_after_ms=read.start_after_ms,
            arrived_at=now,
            cost=read.cost,
            seq=self._registry.next_seq(),
            attempt=read.attempt,
            max_attempts=request.max_attempts or None,
            epoch=self._registry.generation,
            stream=request.stream,
            first_place=read.origin,
            body=body,
            labels=labels_of(request).with_key(body.headers),
            size_bytes=read.size_bytes,
            requirements=request.requirements,
        )
        work.ttl_ms = ttl_ms
        work.may_resume_stream = request.stream and read.origin.append_time_ms < self._registry.owned_since_ms < float(
            "inf"
        )
        images = next(image_references(request.payload), None)
        work.stored_input = request.input_artifact is not None or images is not None
        self._histories.begin(work, request.history)
        self._registry.hold(work)
        return work

    def fetched(self, key: WorkKey, read: Taken | Poison, body: Body, now: float) -> None:
        """The record of a parked request was read again; another request in its place means that it is gone."""
        work = self._registry.works.get(key)
        if work is None or work.stage is not Stage.FETCHING:
            return
        if isinstance(read, Poison) or read.request.request_id != work.request_id or read.request.tenant != work.tenant:
            self.gone(key, now)
            return
        work.body = body
        self._budget.keep_body(work.klass, work.lane, work.size_bytes)
        if work.end_with is not None:
            self._endings.end(work, "fetched_to_end", work.end_with, now)
            return
        if work.pass_to is not None:
            self._unserved.fetched(work)
            return
        self._registry.transition(work, "fetched", Stage.QUEUED)
        self._dirty.look_at(self._lanes[work.lane])

    def gone(self, key: WorkKey, now: float) -> None:
        """The record of a parked request is not there any more."""
        work = self._registry.works.get(key)
        if work is None or work.stage is not Stage.FETCHING:
            return
        self._holdings.unqueue(work)
        reason = work.end_with or InternalError("its record was deleted from the topic before its turn came")
        self._endings.letter(work, "gone", reason)
