"""How a request ends: its outcome on the way to the broker, its answer kept, its dead letter, its silent end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.processors.core.board import Board
from penstock.processors.core.effects import CancelRun, ForgetDeaths, Keep, Letter, LookUp, Status, Terminal
from penstock.processors.core.states import IN_SCHEDULER, OVER, Stage
from penstock.processors.core.suspects import clear_suspicion
from penstock.processors.core.work import Work
from penstock.schemas.errors import InternalError, InvalidRequest, PenstockError


class Endings(Board):
    """Every end is decided once. What replaces a record is durable before its offset may be committed."""

    def looked_up(self, work: Work, finished: Any | None, now: float, *, large: bool = False) -> None:
        """The answer that stands in the conversation of a request that was to end unrun, or None."""
        if work.stage is not Stage.LOOKING:
            return
        if finished is not None:
            self._completed(work, "looked_up", finished, now, append=False, large=large)
        else:
            self._settle(work, "looked_up", now, error=work.end_with)

    def kept(self, work: Work, finished: Any, artifact: Any, now: float, *, another: bool = False) -> None:
        """Its answer stands in the conversation; a large output is an artifact.

        `another`: the answer that counts is that of an earlier run, not what this run said.
        """
        if work.stage is Stage.KEEPING:
            if another and work.run is not None and work.run.sent_pieces:
                work.attempt += 1  # readers must be able to tell the answer from the words that were published
            self._settle(work, "kept", now, finished=finished, artifact=artifact)

    def keep_failed(self, work: Work, error: PenstockError, now: float) -> None:
        """Its answer can never be kept."""
        if work.stage is Stage.KEEPING:
            self._settle(work, "kept", now, error=error)

    def moved(self, work: Work) -> None:
        """Its record stands on the partition of its conversation."""
        if work.stage is Stage.MOVING:
            self._transition(work, "moved", Stage.DONE)
            self._complete(work)

    def cannot_move(self, work: Work, error: PenstockError) -> None:
        """Its record cannot be written again; it fails when its caller is to blame, who named an unknown pool."""
        if work.stage is not Stage.MOVING:
            return
        if isinstance(error, InvalidRequest):
            self._settle(work, "unmovable", self.now, error=error)
        else:
            self._letter(work, "unmovable", error)

    def lettered(self, work: Work, now: float) -> None:
        """The broker has its dead letter."""
        if work.stage is not Stage.LETTERING:
            return
        if work.request_id:
            status = status_of(work.end_with) if work.end_with is not None else "dead_lettered"
            self._settle(work, "lettered", now, error=work.error, status=status)
        else:
            self._transition(work, "lettered", Stage.DONE)
            self._complete(work)

    def delivered(self, work: Work, status: str) -> None:
        """The broker has its terminal event: its offset may be committed."""
        if work.stage is not Stage.SETTLING:
            return
        if work.twins:
            self._emit(replace(work.outcome, origin=work.twins.pop(0)))
            return
        self._transition(work, "delivered", Stage.DONE)
        if self._deaths(work.key, work.request_id):
            self._emit(ForgetDeaths(work.key, work.request_id))
        self._complete(work)
        self._emit(Status(work, status, work.attempt, work.epoch, done=True))

    def chunk_refused(self, work: Work, now: float) -> None:
        """A piece of its stream can never be published: the whole could not either."""
        if work.stage is Stage.RUNNING:
            self._stop_run(work)
            error = InternalError("a piece of the output cannot be published")
            self._settle(work, "failed", now, error=error)

    def _completed(self, work: Work, event: str, finished: Any, now: float, *, append: bool, large: bool) -> None:
        if append or large:
            self._transition(work, event, Stage.KEEPING)
            self._emit(Keep(work, finished, append))
        else:
            self._settle(work, event, now, finished=finished)

    def _settle(
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
        self._transition(work, event, Stage.SETTLING)
        work.pending_status = status
        work.outcome = Terminal(work, status, now, error, finished, artifact)
        self._emit(work.outcome)

    def _letter(self, work: Work, event: str, error: PenstockError) -> None:
        work.error = error
        self._transition(work, event, Stage.LETTERING)
        self._emit(Letter(work, error, nameless=not work.request_id))

    def _end_unrun(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End what did not run here; a turn only if it has no answer from a worker that died before it could say so."""
        if work.line is None:
            self._settle(work, event, now, error=error)
        else:
            work.end_with = error
            self._transition(work, event, Stage.LOOKING)
            self._emit(LookUp(work))

    def _end_waiting(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End what waits in the scheduler, or for a retry; what is parked is read again for its outcome."""
        if work.stage is Stage.FETCHING:
            work.end_with = work.end_with or error
            self._unqueue(work)
        elif work.stage is Stage.PARKED:
            work.end_with = error
            self._unqueue(work)
            self.lane(work.lane).parked[work.klass] -= 1
            self._transition(work, "fetch", Stage.FETCHING)
            self.rereads.add(work)
        elif work.stage is Stage.RETRYING:
            self._settle(work, event, now, error=error)
        else:
            self._leave_waiting(work)
            self._end_unrun(work, event, error, now)

    def _end_running(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        run = work.run
        if work.stage is Stage.RUNNING and work.stream and run is not None:
            self.streams.flush(work, run)
        self._stop_run(work)
        self._settle(work, event, now, error=error)

    def _drop(self, work: Work) -> None:
        if work.stage in OVER:
            return
        self._stop_run(work)
        self._leave_waiting(work)
        self._transition(work, "drop", Stage.DROPPED)
        self._forget(work)

    def _complete(self, work: Work) -> None:
        """What replaces the record is durable."""
        self.gate.complete(work.tp, work.key[2])
        self._forget(work)

    def _forget(self, work: Work) -> None:
        if self.works.get(work.key) is work:
            del self.works[work.key]
        subject = (work.tenant, work.request_id)
        if self._subjects.get(subject) is work:
            del self._subjects[subject]
        if work.in_budget:
            self.budget.drop_fact(work.tp)
            if work.body is not None:
                self.budget.drop_body(work.klass, work.lane, work.size_bytes)
            self.rereads.over(work)
        clear_suspicion(work)
        if work.line is not None and work.holds_line:
            self.scheduler.release_line(work.line)
            self._all_dirty()  # the next turn may be for another model

    def _stop_run(self, work: Work) -> None:
        """Its engine need not go on, and what it held comes back."""
        if work.run is not None and work.stage in (Stage.PREPARING, Stage.READY, Stage.BEGINNING, Stage.RUNNING):
            self._emit(CancelRun(work.lane, work.run.replica, work.run.run_id))
            replica = self.lane(work.lane).replica_of(work)
            if replica is not None:
                replica.stopped_at = self.now
        self._give_back(work)

    def _leave_waiting(self, work: Work) -> None:
        """Out of the scheduler, if it is there."""
        if work.stage in IN_SCHEDULER:
            if work.stage is Stage.PARKED:
                self.lane(work.lane).parked[work.klass] -= 1
            self._stop_run(work)
            self._unqueue(work)

    def _unqueue(self, work: Work) -> None:
        """Out of the scheduler, which lets go of its line if it held one."""
        self.scheduler.remove(work)
        work.holds_line = False

    def _hold_line(self, work: Work) -> None:
        """Out of the scheduler, but its conversation waits for it: its next attempt runs in place.

        A turn of another class may be under way: then it holds nothing, and is queued anew behind that one.
        """
        if work.stage not in IN_SCHEDULER:
            return
        if self.scheduler.eligible(work):
            self.scheduler.hold(work)
            work.holds_line = work.line is not None
        else:
            self._unqueue(work)

    def _give_back(self, work: Work) -> None:
        if work.lane:
            lane = self.lane(work.lane)
            held_memory = work in self.starter.memory.heads or (work.run is not None and work.run.grant is not None)
            if self.starter.leave(lane, work):
                self._mark_changed(lane)
            if held_memory:
                self._memory_is_back()

    def _memory_is_back(self) -> None:
        """Others may wait for it: placement is asked at once when they do, for each run that ends it would be dear."""
        if self.starter.memory.heads:
            self._plan_due = True
        for lane in self.lanes.values():
            if lane.short:
                self._plan_due = True
            if lane.run_wants:
                self._mark_changed(lane)


def status_of(error: PenstockError) -> str:
    """The status with which a request ends by this error."""
    return {"cancelled": "cancelled", "expired": "expired", "dead_lettered": "dead_lettered"}.get(error.code, "failed")
