"""How a request ends: its outcome on the way to the broker, its answer kept, its dead letter, its silent end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.processors.core.effects import Effect, ForgetDeaths, Keep, Letter, LookUp, Status, Terminal
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.states import Stage
from penstock.processors.core.requests.streams import Streams
from penstock.processors.core.requests.work import Work, WorkKey
from penstock.schemas.errors import InternalError, InvalidRequest, PenstockError


@dataclass(eq=False)
class Endings:
    """Every end is decided once. What replaces a record is durable before its offset may be committed."""

    _registry: Registry
    _holdings: Holdings
    _lanes: Lanes
    _streams: Streams
    _emit: Callable[[Effect], None]
    _deaths: Callable[[WorkKey, str], int]

    def looked_up(self, work: Work, finished: Any | None, now: float, *, large: bool = False) -> None:
        """The answer that stands in the conversation of a request that was to end unrun, or None."""
        if work.stage is not Stage.LOOKING:
            return
        if finished is not None:
            self.completed(work, "looked_up", finished, now, append=False, large=large)
        elif work.error is not None:
            self.letter(work, "looked_up", work.error)
        else:
            self.settle(work, "looked_up", now, error=work.end_with)

    def kept(self, work: Work, finished: Any, artifact: Any, now: float, *, another: bool = False) -> None:
        """Its answer stands in the conversation; a large output is an artifact.

        `another`: the answer that counts is that of an earlier run, not what this run said.
        """
        if work.stage is Stage.KEEPING:
            if another and work.run is not None and work.run.sent_pieces:
                work.attempt += 1  # readers must be able to tell the answer from the words that were published
            self.settle(work, "kept", now, finished=finished, artifact=artifact)

    def keep_failed(self, work: Work, error: PenstockError, now: float) -> None:
        """Its answer can never be kept."""
        if work.stage is Stage.KEEPING:
            self.settle(work, "kept", now, error=error)

    def moved(self, work: Work) -> None:
        """Its record stands on the partition of its conversation."""
        if work.stage is Stage.MOVING:
            self._registry.transition(work, "moved", Stage.DONE)
            self._holdings.complete(work)

    def cannot_move(self, work: Work, error: PenstockError, now: float) -> None:
        """Its record cannot be written again; it fails when its caller is to blame, who named an unknown pool."""
        if work.stage is not Stage.MOVING:
            return
        if isinstance(error, InvalidRequest):
            self.end_unrun(work, "unmovable", error, now)
        else:
            self.letter_unrun(work, "unmovable", error)

    def lettered(self, work: Work, now: float) -> None:
        """The broker has its dead letter."""
        if work.stage is not Stage.LETTERING:
            return
        if work.request_id:
            status = status_of(work.end_with) if work.end_with is not None else "dead_lettered"
            self.settle(work, "lettered", now, error=work.error, status=status)
        else:
            self._registry.transition(work, "lettered", Stage.DONE)
            self._holdings.complete(work)

    def delivered(self, work: Work, status: str) -> None:
        """The broker has its terminal event: its offset may be committed."""
        if work.stage is not Stage.SETTLING:
            return
        if work.twins:
            self._emit(replace(work.outcome, origin=work.twins.pop(0)))
            return
        self._registry.transition(work, "delivered", Stage.DONE)
        # What ended unrun, for its deaths, keeps them: it may be delivered again before its offset is committed.
        if work.started_at is not None and self._deaths(work.key, work.request_id):
            self._emit(ForgetDeaths(work.key, work.request_id))
        self._holdings.complete(work)
        self._emit(Status(work, status, work.attempt, work.epoch, done=True))

    def chunk_refused(self, work: Work, now: float) -> None:
        """A piece of its stream can never be published: the whole could not either."""
        if work.stage is Stage.RUNNING:
            self._holdings.stop_run(work)
            error = InternalError("a piece of the output cannot be published")
            self.settle(work, "failed", now, error=error)

    def completed(self, work: Work, event: str, finished: Any, now: float, *, append: bool, large: bool) -> None:
        if append or large:
            self._registry.transition(work, event, Stage.KEEPING)
            self._emit(Keep(work, finished, append))
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
        work.pending_status = status
        work.outcome = Terminal(work, status, now, error, finished, artifact)
        self._emit(work.outcome)

    def letter(self, work: Work, event: str, error: PenstockError) -> None:
        work.error = error
        self._registry.transition(work, event, Stage.LETTERING)
        self._emit(Letter(work, error, nameless=not work.request_id))

    def end_unrun(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End what did not run here; a turn only if it has no answer from a worker that died before it could say so."""
        if work.line is None:
            self.settle(work, event, now, error=error)
        else:
            work.end_with = error
            self._registry.transition(work, event, Stage.LOOKING)
            self._emit(LookUp(work))

    def letter_unrun(self, work: Work, event: str, error: PenstockError) -> None:
        """As `end_unrun`, with a dead letter where no answer stands."""
        if work.line is None:
            self.letter(work, event, error)
        else:
            work.error = error
            self._registry.transition(work, event, Stage.LOOKING)
            self._emit(LookUp(work))

    def end_waiting(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End what waits in the scheduler, or for a retry; what is parked is read again for its outcome."""
        if work.stage is Stage.FETCHING:
            work.end_with = work.end_with or error
            self._holdings.unqueue(work)
        elif work.stage is Stage.PARKED:
            work.end_with = error
            self._holdings.unqueue(work)
            self._lanes[work.lane].parked[work.klass] -= 1
            self._registry.transition(work, "fetch", Stage.FETCHING)
            self._holdings.rereads.add(work)
        elif work.stage is Stage.RETRYING:
            self.settle(work, event, now, error=error)
        else:
            self._holdings.leave_waiting(work)
            self.end_unrun(work, event, error, now)

    def end_running(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        run = work.run
        if work.stage is Stage.RUNNING and work.stream and run is not None:
            self._streams.flush(work, run)
        self._holdings.stop_run(work)
        self.settle(work, event, now, error=error)


def status_of(error: PenstockError) -> str:
    """The status with which a request ends by this error."""
    return {"cancelled": "cancelled", "expired": "expired", "dead_lettered": "dead_lettered"}.get(error.code, "failed")
