"""How a request ends: its outcome on the way to the broker, its answer kept, its dead letter, its silent end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.processors.core.effects import Effect, ForgetDeaths, Keep, LookUp, PublishDeadLetter, Terminal
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.requests.histories import Histories
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.states import Stage
from penstock.processors.core.requests.statuses import status_event
from penstock.processors.core.requests.streams import Streams
from penstock.processors.core.requests.work import Subject, Work, WorkKey
from penstock.schemas.errors import Expired, InternalError, InvalidRequest, PenstockError


@dataclass(eq=False)
class Endings:
    """Every end is decided once. What replaces a record is durable before its offset may be committed."""

    _registry: Registry
    _holdings: Holdings
    _lanes: Lanes
    _streams: Streams
    _histories: Histories
    _emit: Callable[[Effect], None]
    _deaths: Callable[[WorkKey, str], int]

    def awaits(self, subject: Subject, stage: Stage) -> bool:
        """Whether the request is in this stage still, and waits for the answer that ends it."""
        return self._in(subject, stage) is not None

    def expire_waiting(self, work: Work, now: float) -> None:
        """Its deadline passed before it could run."""
        because = "" if work.failure is None else f"; its last attempt failed: {work.failure}"
        self.end_waiting(work, "expire", Expired(f"its deadline passed while it waited{because}"), now)

    def looked_up(
        self, subject: Subject, finished: Any | None, now: float, *, large: bool = False, output_bytes: int = 0
    ) -> None:
        """The answer that stands in the conversation of a request that was to end unrun, or None."""
        if (work := self._in(subject, Stage.LOOKING)) is None:
            return
        if finished is not None:
            self.completed(work, "looked_up", finished, now, append=False, large=large, output_bytes=output_bytes)
        elif work.error is not None:
            self.letter(work, "looked_up", work.error)
        else:
            self.settle(work, "looked_up", now, error=work.end_with)

    def kept(
        self,
        subject: Subject,
        finished: Any,
        artifact: Any,
        now: float,
        *,
        another: bool = False,
        output_bytes: int | None = None,
    ) -> None:
        """Its answer stands in the conversation; a large output is an artifact.

        `another`: the answer that counts is that of an earlier run, not what this run said. `output_bytes`: what is
        left of the output in memory; None: all of it.
        """
        if (work := self._in(subject, Stage.KEEPING)) is not None:
            if output_bytes is not None:
                self._registry.hold_output(work, output_bytes)
            if another and work.run is not None and work.run.sent_pieces:
                work.attempt += 1  # readers must be able to tell the answer from the words that were published
                work.run.since = None
            self.settle(work, "kept", now, finished=finished, artifact=artifact)

    def keep_failed(self, subject: Subject, error: PenstockError, now: float) -> None:
        """Its answer can never be kept."""
        if (work := self._in(subject, Stage.KEEPING)) is not None:
            self.settle(work, "kept", now, error=error)

    def moved(self, subject: Subject) -> None:
        """Its record stands on the partition of its conversation."""
        if (work := self._in(subject, Stage.MOVING)) is not None:
            self._registry.transition(work, "moved", Stage.DONE)
            self._holdings.complete(work)

    def cannot_move(self, subject: Subject, error: PenstockError, now: float) -> None:
        """Its record cannot be written again; it fails when its caller is to blame, who named an unknown pool."""
        if (work := self._in(subject, Stage.MOVING)) is None:
            return
        if isinstance(error, InvalidRequest):
            self.end(work, "unmovable", error, now)
        else:
            self.letter(work, "unmovable", error)

    def lettered(self, subject: Subject, now: float) -> None:
        """The broker has its dead letter."""
        if (work := self._in(subject, Stage.LETTERING)) is None:
            return
        if work.request_id:
            status = status_of(work.end_with) if work.end_with is not None else "dead_lettered"
            self.settle(work, "lettered", now, error=work.error, status=status)
        else:
            self._registry.transition(work, "lettered", Stage.DONE)
            self._holdings.complete(work)

    def delivered(self, subject: Subject, status: str) -> bool:
        """The broker has its terminal event: its offset may be committed.

        Returns False when the request was let go of meanwhile: its new owner ends it.
        """
        if (work := self._in(subject, Stage.SETTLING)) is None:
            return False
        if work.repeats:
            self._emit(replace(work.outcome, origin=work.repeats.pop(0)))
            return True
        self._registry.transition(work, "delivered", Stage.DONE)
        # What ended unrun, for its deaths, keeps them: it may be delivered again before its offset is committed.
        known = work.history is not None or self._deaths(work.first_key, work.request_id)
        if known and (work.started_at is not None or work.run is not None):
            self._emit(ForgetDeaths(work.first_key, work.request_id))
        self._holdings.complete(work)
        self._emit(status_event(work, status, done=True))
        return True

    def chunk_refused(self, subject: Subject, now: float) -> None:
        """A piece of its stream can never be published: the whole could not either."""
        if (work := self._in(subject, Stage.RUNNING)) is not None:
            self._holdings.stop_run(work)
            error = InternalError("a piece of the output cannot be published")
            self.settle(work, "failed", now, error=error)

    def completed(
        self, work: Work, event: str, finished: Any, now: float, *, append: bool, large: bool, output_bytes: int
    ) -> None:
        self._registry.hold_output(work, output_bytes)
        if append or large:
            self._registry.transition(work, event, Stage.KEEPING)
            topic_id = work.run.topic_id if append and work.run is not None else None
            self._emit(Keep(work.subject, finished, topic_id, work.deadline_ms))
        else:
            self.settle(work, event, now, finished=finished)

    def settle(
        self,
        work: Work,
        event: str,
        now: float,
        *,
        error: PenstockError | None = None,
        finished: Any = None,
        artifact: Any = None,
        status: str | None = None,
    ) -> None:
        """Its outcome goes to the broker, once."""
        status = status or ("completed" if error is None else status_of(error))
        self._registry.transition(work, event, Stage.SETTLING)
        if finished is None:
            self._registry.hold_output(work, 0)
        work.unkept = None
        work.pending_status = status
        self._histories.ended(work, error, now)
        run = work.run
        replica = None if run is None else run.replica
        ran_s = None if run is None or run.run_at is None else now - run.run_at
        timings = work.timings(now)
        since = None if work.run is None or finished is None else work.run.since
        work.outcome = Terminal(
            work.subject,
            status,
            work.klass,
            timings,
            ran_s,
            replica,
            error,
            finished,
            artifact,
            since=since,
            prepared=None if run is None or finished is None else run.prepared,
        )
        self._emit(work.outcome)

    def end(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End it without an output; a turn of which no run has begun here only if its conversation has no answer.

        A worker that died, or lost its partition, may have appended one before it could say so.
        """
        if work.line is None or work.begun:
            self.settle(work, event, now, error=error)
        else:
            work.end_with = error
            self._look_up(work, event)

    def letter(self, work: Work, event: str, error: PenstockError) -> None:
        """As `end`, with a dead letter where no answer stands."""
        work.error = error
        if work.line is None or work.begun or work.stage is Stage.LOOKING:
            self._registry.transition(work, event, Stage.LETTERING)
            self._emit(PublishDeadLetter(work.subject, error, nameless=not work.request_id))
        else:
            self._look_up(work, event)

    def _look_up(self, work: Work, event: str) -> None:
        self._registry.transition(work, event, Stage.LOOKING)
        self._emit(LookUp(work.subject))

    def end_waiting(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End what waits in the scheduler, or for a retry; what is parked is read again for its outcome."""
        if work.stage is Stage.FETCHING:
            work.end_with = work.end_with or error
            self._holdings.unqueue(work)
        elif work.stage is Stage.PARKED:
            self._holdings.unqueue(work)
            self._lanes[work.lane].parked[work.klass] -= 1
            self._fetch_to_end(work, error)
        elif work.stage is Stage.RETRYING and work.body is None:
            self._fetch_to_end(work, error)
        elif work.stage is Stage.RETRYING:
            self.end(work, event, error, now)
        else:
            self._holdings.leave_waiting(work)
            self.end(work, event, error, now)

    def _fetch_to_end(self, work: Work, error: PenstockError) -> None:
        """Its outcome names what its record holds: that is read again."""
        work.end_with = error
        self._registry.transition(work, "fetch", Stage.FETCHING)
        self._holdings.rereads.add(work)

    def _in(self, subject: Subject, stage: Stage) -> Work | None:
        """The request that an answer speaks of, if it waits for that answer still."""
        work = self._registry.of(subject)
        return work if work is not None and work.stage is stage else None

    def end_running(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        run = work.run
        if work.stage is Stage.RUNNING and work.stream and run is not None:
            self._streams.flush(work, run)
        self._holdings.stop_run(work)
        self.end(work, event, error, now)


def status_of(error: PenstockError) -> str:
    """The status with which a request ends by this error."""
    return {"cancelled": "cancelled", "expired": "expired", "dead_lettered": "dead_lettered"}.get(error.code, "failed")
