"""Records as they are delivered, and those that were parked and are read again."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.processors.core.arrivals import Poison, Taken
from penstock.processors.core.effects import Republish
from penstock.processors.core.gate import Arrival
from penstock.processors.core.placing import Placing
from penstock.processors.core.states import Stage
from penstock.processors.core.work import Body, Work, WorkKey
from penstock.schemas.abilities import needed
from penstock.schemas.errors import (
    Cancelled,
    EngineFailed,
    Expired,
    InternalError,
    PenstockError,
    conversation_deleted,
)
from penstock.schemas.topics import TP, priority_class

TWINS = 16
"""So many repeats of a request have outcomes of their own."""


class Arriving(Placing):
    """What a record is to this worker: new work, a repeat, poison, or one that belongs on another partition."""

    def delivered_range(self, tp: TP, start: int, end: int, offsets: Sequence[int]) -> None:
        """The consumer has delivered [start, end) of a partition, with records at `offsets`. Raises GapInDelivery.

        Call it before the first `arrived` of the range; those may follow at any later time.
        """
        self.gate.batch(tp, start, end, offsets)

    def arrived(
        self,
        tp: TP,
        offset: int,
        read: Taken | Poison,
        value: bytes,
        headers: tuple[tuple[str, bytes | None], ...],
        record_key: bytes | None,
        now: float,
        wall_ms: int,
    ) -> Work | None:
        """A record of a delivered range. Returns the work when it is new."""
        key = (*tp, offset)
        arrival = self.gate.arrive(tp, offset, _gate_id(read, key))
        if arrival is Arrival.DUPLICATE:
            self._twin(read)
        if arrival is not Arrival.NEW:
            return None
        if (former := self.works.get(key)) is not None:  # of a topic that was deleted and made anew since
            self._drop(former)
        if isinstance(read, Poison):
            return self._poison(key, read, value, headers, record_key, now)
        body = Body(read.request, value, headers, record_key, read.size_bytes)
        work = self._hold(key, read, body, now, wall_ms)
        if read.belongs_on is not None or read.pool is not None:
            self._transition(work, "arrive_elsewhere", Stage.MOVING)
            self._emit(Republish(work, read.belongs_on, read.origin, read.pool))
            return work
        self._subjects[(work.tenant, work.request_id)] = work
        error = read.error or self._unfit(work, read, wall_ms)
        if error is None:
            self._enqueue(work, now)
        elif isinstance(error, Cancelled | Expired):
            self._end_unrun(work, "arrive_ended", error, now)
        elif isinstance(error, EngineFailed):  # what two workers died of is not tried again
            self._letter(work, "arrive_poison", error)
        else:
            self._settle(work, "arrive_ended", now, error=error)
        return work

    def _twin(self, read: Taken | Poison) -> None:
        """The request that is held stands here too, and an earlier worker may have published under this origin.

        What came since this worker owns the partition was published by nobody: that repeat ends silently.
        """
        if isinstance(read, Poison) or read.origin.append_time_ms >= self.owned_since_ms:
            return
        work = self._subjects.get((read.request.tenant, read.request.request_id))
        known = work is None or read.origin == work.first_place or read.origin in work.twins
        if work is not None and not known and len(work.twins) < TWINS:
            work.twins.append(read.origin)

    def _poison(
        self,
        key: WorkKey,
        poison: Poison,
        value: bytes,
        headers: tuple[tuple[str, bytes | None], ...],
        record_key: bytes | None,
        now: float,
    ) -> Work:
        work = Work(
            key=key,
            request_id=poison.request_id or "",
            tenant=poison.tenant or "default",
            task="text_generation",
            klass="medium",
            priority=5,
            lane="",
            line=None,
            deadline_ms=None,
            deadline=None,
            arrived_at=now,
            cost=1,
            seq=next(self._seq),
            attempt=poison.attempt,
            max_attempts=1,
            epoch=self.generation,
            stream=False,
            first_place=poison.origin,
            body=None,
            size_bytes=len(value),
        )
        stub = work.request
        work.body = Body(stub, value, headers, record_key, len(value))
        self.works[key] = work
        self._letter(work, "arrive_poison", poison.reason)
        return work

    def _hold(self, key: WorkKey, read: Taken, body: Body, now: float, wall_ms: int) -> Work:
        request = read.request
        self.explainer.clock(now, wall_ms)
        ttl_ms = None if read.names_deadline else self.lifetimes.choose_ms(read.klass)
        deadline_ms = read.deadline_ms if ttl_ms is None else read.origin.append_time_ms + ttl_ms
        deadline = None if deadline_ms is None else now + (deadline_ms - wall_ms) / 1000
        work = Work(
            key=key,
            request_id=request.request_id,
            tenant=request.tenant,
            task=request.task,
            klass=read.klass,
            priority=request.priority,
            lane="",
            line=read.line,
            deadline_ms=deadline_ms,
            deadline=deadline,
            arrived_at=now,
            cost=read.cost,
            seq=next(self._seq),
            attempt=read.attempt,
            max_attempts=request.max_attempts,
            epoch=self.generation,
            stream=request.stream,
            first_place=read.origin,
            body=body,
            size_bytes=read.size_bytes,
        )
        work.ttl_ms = ttl_ms
        self.works[key] = work
        return work

    def _unfit(self, work: Work, read: Taken, wall_ms: int) -> PenstockError | None:
        """Why it must not run at all; else its lane is known."""
        cancel = self._commands.cancelled(work.tenant, work.request_id)
        if cancel is not None:
            return Cancelled(cancel.reason or "cancelled before it ran")
        if work.line is not None and self._conversation_was_deleted(read):
            return conversation_deleted()
        if work.deadline_ms is not None and wall_ms >= work.deadline_ms:
            return Expired("its deadline passed before it was taken")
        try:
            request = read.request
            need = needed(work.task, request.payload)
            work.lane, work.model_reason = self._catalog.resolve(work.task, request.model, need)
            self.check_fits(self.lane(work.lane), read.request.requirements)
        except PenstockError as error:
            return error
        deaths = self._deaths(work.key, work.request_id)
        if deaths >= work.max_attempts:
            return EngineFailed(f"{deaths} times a worker died while it ran")
        work.alone = deaths >= 2
        changed = self._commands.priority(work.tenant, work.request_id)
        if changed is not None:
            work.priority, work.klass = changed, priority_class(changed)
        return None

    def _conversation_was_deleted(self, read: Taken) -> bool:
        """Whether it was deleted after this turn was sent."""
        deleted_at = self._commands.deleted_at(read.request.tenant, read.request.conversation_id or "")
        return deleted_at is not None and read.origin.append_time_ms <= deleted_at

    def _enqueue(self, work: Work, now: float) -> None:
        lane = self.lane(work.lane)
        work.in_budget = True
        self.budget.count_fact(work.tp)
        if self.budget.try_keep_body(work.klass, work.lane, work.size_bytes):
            self._transition(work, "arrive", Stage.QUEUED)
        else:
            work.body = None
            lane.parked[work.klass] += 1
            self._transition(work, "arrive", Stage.PARKED)
        work.position = self.scheduler.up_to(work.klass)
        self.scheduler.add(work)
        self.statuses.say(work, "queued", now)
        self._mark_changed(lane)

    def fetched(self, key: WorkKey, read: Taken | Poison, body: Body, now: float) -> None:
        """The record of a parked request was read again; another request in its place means that it is gone."""
        work = self.works.get(key)
        if work is None or work.stage is not Stage.FETCHING:
            return
        if isinstance(read, Poison) or read.request.request_id != work.request_id or read.request.tenant != work.tenant:
            self.gone(key, now)
            return
        work.body = body
        self.budget.keep_body(work.klass, work.lane, work.size_bytes)
        if work.end_with is not None:
            self._end_unrun(work, "fetched_to_end", work.end_with, now)
            return
        self._transition(work, "fetched", Stage.QUEUED)
        self._mark_changed(self.lane(work.lane))

    def gone(self, key: WorkKey, now: float) -> None:
        """The record of a parked request is not there any more."""
        work = self.works.get(key)
        if work is None or work.stage is not Stage.FETCHING:
            return
        self._unqueue(work)
        reason = work.end_with or InternalError("its record was deleted from the topic before its turn came")
        self._letter(work, "gone", reason)


def _gate_id(read: Taken | Poison, key: WorkKey) -> str:
    """What names the work in the gate: the same request at a second offset is held back, except on its way home."""
    if isinstance(read, Poison):
        return f"poison {key}"
    if read.belongs_on is not None or read.pool is not None:
        return f"moved {key}"
    return f"{read.request.tenant}/{read.request.request_id}"
