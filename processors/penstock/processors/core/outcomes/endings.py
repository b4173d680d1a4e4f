"""How a request ends: its answer on the way to its conversation, its outcome or dead letter to the broker.

What comes back of these is heard in `durable.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.processors.core.effects import CheckForAnswer, Effect, PublishDeadLetter, StoreOutput, Terminal
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.requests.histories import Histories
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.streams import Streams
from penstock.processors.core.work.states import NOT_DUE, Stage
from penstock.processors.core.work.work import Run, Work
from penstock.schemas.errors import Cancelled, Expired, PenstockError


class Erased(Cancelled):
    """How a request ends that is delivered again after its tenant erased it: what it left does not count."""

    def __init__(self) -> None:
        super().__init__("its tenant erased it")


@dataclass(eq=False)
class Endings:
    """Every end is decided once. What replaces a record is durable before its offset may be committed."""

    _registry: Registry
    _holdings: Holdings
    _lanes: Lanes
    _streams: Streams
    _histories: Histories
    _emit: Callable[[Effect], None]

    def expire_waiting(self, work: Work, now: float) -> None:
        """Its deadline passed before it could run."""
        because = "" if work.failure is None else f"; its last attempt failed: {work.failure}"
        self.end_waiting(work, "expire", Expired(f"its deadline passed while it waited{because}"), now)

    def completed(
        self, work: Work, event: str, finished: Any, now: float, *, append: bool, large: bool, output_bytes: int
    ) -> None:
        self._registry.hold_output(work, output_bytes)
        if append or large:
            self._registry.transition(work, event, Stage.STORING)
            to = _appended_to(work.run) if append and work.run is not None else None
            self._emit(StoreOutput(work.subject, finished, to, work.deadline_ms))
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
        self._registry.transition(work, event, Stage.PUBLISHING)
        if finished is None:
            self._registry.hold_output(work, 0)
        work.awaiting_store = None
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
            prepared_s=None if run is None or run.granted_at is None else run.granted_at - run.preparing_since,
        )
        self._emit(work.outcome)

    def end(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End it without an output; a turn of which no run has begun here, and a summary, only if its conversation has
        none.

        A worker that died, or lost its partition, may have appended one before it could publish it. What was erased
        is not looked up: it must not be published again.
        """
        if work.conversation_id is None or work.begun or work.stage is Stage.RUNNING or isinstance(error, Erased):
            self.settle(work, event, now, error=error)
        else:
            work.end_with = error
            self._look_up(work, event)

    def end_awaiting_store(self, work: Work, event: str, keep: StoreOutput, error: PenstockError, now: float) -> None:
        """End a finished request of which `keep` was not done. If it was to be appended, it may have been: only the
        conversation can say that.
        """
        if keep.to is None:
            self.settle(work, event, now, error=error)
        else:
            work.end_with, work.awaiting_store = error, None
            self._registry.hold_output(work, 0)
            self._look_up(work, event)

    def letter(self, work: Work, event: str, error: PenstockError) -> None:
        """As `end`, with a dead letter if the conversation has no answer."""
        work.error = error
        if work.conversation_id is None or work.begun or work.stage in (Stage.RUNNING, Stage.CHECKING_FOR_ANSWER):
            self._registry.transition(work, event, Stage.DEAD_LETTERING)
            self._emit(PublishDeadLetter(work.subject, error, nameless=not work.request_id))
        else:
            self._look_up(work, event)

    def _look_up(self, work: Work, event: str) -> None:
        self._registry.transition(work, event, Stage.CHECKING_FOR_ANSWER)
        self._emit(CheckForAnswer(work.subject))

    def end_waiting(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End what waits in the scheduler, or for a time; what is parked is read again for its outcome."""
        if work.stage is Stage.FETCHING:
            work.end_with = work.end_with or error
            self._holdings.unqueue(work)
        elif work.stage is Stage.PARKED or (work.stage in NOT_DUE and work.body is None):
            work.end_with = error
            self.fetch(work)
        elif work.stage is Stage.RETRYING:
            self.end(work, event, error, now)
        else:
            self._holdings.leave_waiting(work)
            self.end(work, event, error, now)

    def fetch(self, work: Work) -> None:
        """Take it out of the queue and read its record again: its outcome, or its copy, needs the bytes."""
        if work.stage is Stage.PARKED:
            self._holdings.unqueue(work)
            self._lanes[work.lane].parked[work.klass] -= 1
        self._holdings.count(work)
        self._registry.transition(work, "fetch", Stage.FETCHING)
        self._holdings.rereads.add(work)

    def end_running(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        run = work.run
        if work.stage is Stage.RUNNING and work.stream and run is not None:
            self._streams.flush(work, run)
        self._holdings.stop_run(work)
        self.end(work, event, error, now)


def status_of(error: PenstockError) -> str:
    """The status with which a request ends by this error."""
    return {"cancelled": "cancelled", "expired": "expired", "dead_lettered": "dead_lettered"}.get(error.code, "failed")


def _appended_to(run: Run) -> Any:
    """Where its output is to be appended, as its shell has said: the topic that holds its input, or what was read."""
    return run.mark if run.appends else run.topic_id
