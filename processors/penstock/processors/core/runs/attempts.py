"""A request's attempts: prepared, begun, running, failed and tried again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.processors.core.effects import Effect, Retried
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.queue.forecast import Forecast
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.granting import Grants
from penstock.processors.core.requests.histories import Histories
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.requests.streams import Streams
from penstock.processors.core.runs.retry_queue import RetryQueue
from penstock.processors.core.work.retries import DeadLetter, Fail, Requeue, Retry
from penstock.processors.core.work.states import IN_SCHEDULER, ON_LANE, OVER, Stage
from penstock.processors.core.work.suspects import clear_suspicion
from penstock.processors.core.work.work import Subject, Work
from penstock.schemas.errors import InsufficientCapacity, PenstockError

UNDER_WAY = tuple(stage for stage in Stage if stage not in OVER)


@dataclass(eq=False)
class Attempts:
    """Every answer names its request and its run. An answer for a run that is over changes nothing."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _memory: DeviceMemory
    _grants: Grants
    _statuses: Statuses
    _streams: Streams
    _forecast: Forecast
    _holdings: Holdings
    _endings: Endings
    _retries: RetryQueue
    _histories: Histories
    _dirty: DirtySet
    _emit: Callable[[Effect], None]

    def goes_on(self, subject: Subject, run_id: str, *stages: Stage) -> bool:
        """Whether this is still the request's present run, and it is in one of these stages if any are given."""
        return self._registry.of_run(subject, run_id, *(stages or UNDER_WAY)) is not None

    def prepared(
        self,
        subject: Subject,
        run_id: str,
        need_tokens: int,
        prepared: Any,
        now: float,
        mark: Any = None,
        *,
        memory_bytes: int = 0,
        appends: bool = False,
    ) -> None:
        """Its conversation was read and its prompt counted: `need_tokens` of cache, `memory_bytes` of the device.

        `appends`: its output is appended to its conversation, though it takes no turn.
        """
        work = self._registry.of_run(subject, run_id, Stage.PREPARING)
        if work is None or (run := work.run) is None:
            return
        lane = self._lanes[work.lane]
        replica = lane.replica_of(work)
        if replica is not None and not any(one.could_hold(need_tokens) for one in (replica, *lane.ready)):
            limit = max(one.tokens or 0 for one in (replica, *lane.ready))
            message = f"it needs {need_tokens} tokens of cache; {lane.name} has {limit}"
            details = {"need": need_tokens, "capacity": limit, "unit": "tokens"}
            self.attempt_failed(work, "refused", InsufficientCapacity(message, details=details), now, again=False)
            return
        if (error := self._memory.never_runs(replica, memory_bytes)) is not None:
            self.attempt_failed(work, "refused", error, now, again=False)
            return
        run.need_tokens, run.prepared, run.mark, run.appends = need_tokens, prepared, mark, appends
        work.memory_bytes = memory_bytes
        work.begun = work.begun or appends  # it was looked for what its conversation has of it
        self._registry.transition(work, "prepared", Stage.READY)
        self._dirty.look_at(lane)

    def answer_stands(
        self, subject: Subject, run_id: str, finished: Any, now: float, *, large: bool, output_bytes: int = 0
    ) -> None:
        """The conversation holds its answer already (a worker died after appending it): it is the outcome."""
        if (work := self._registry.of_run(subject, run_id, Stage.PREPARING)) is not None:
            self._holdings.leave_waiting(work)
            work.count_as_new_attempt()
            self._endings.completed(
                work, "answer_stands", finished, now, append=False, large=large, output_bytes=output_bytes
            )

    def refused(self, subject: Subject, run_id: str, error: PenstockError, now: float, *, again: bool) -> None:
        """It cannot be prepared, or its turn cannot begin."""
        work = self._registry.of_run(subject, run_id, Stage.PREPARING, Stage.BEGINNING)
        if work is not None:
            self.attempt_failed(work, "refused", error, now, again=again)

    def begun(self, subject: Subject, run_id: str, now: float, topic_id: str) -> None:
        """Its turn's input is in the conversation, on the topic with this id."""
        work = self._registry.of_run(subject, run_id, Stage.BEGINNING)
        if work is not None and (run := work.run) is not None:
            run.topic_id, work.begun = topic_id, True
            self._grants.run(self._lanes[work.lane], work, run, "begun", now)

    def log_moved(self, subject: Subject, run_id: str, now: float) -> None:
        """Somebody else wrote to the conversation since it was read: its prompt is made again."""
        if (work := self._registry.of_run(subject, run_id, Stage.BEGINNING)) is not None:
            self.requeue(work, "log_moved", now)

    def finished(
        self, subject: Subject, run_id: str, finished: Any, now: float, *, large: bool, output_bytes: int = 0
    ) -> None:
        """The engine is done; `finished` is passed on untouched.

        `large`: something of its output must become an artifact. `output_bytes`: of the whole output.
        """
        work = self._registry.of_run(subject, run_id, Stage.RUNNING)
        if work is None or (run := work.run) is None:
            return
        if work.stream:
            self._streams.flush(work, run)
        lane = self._lanes[work.lane]
        lane.survived()
        if run.run_at is not None:
            self._forecast.ran(work.lane, now - run.run_at, work.cost)
        if work.conversation is not None and (replica := lane.replica_of(work)) is not None:
            lane.remember_prefix(work.conversation, replica)
        self._holdings.give_back(work)
        clear_suspicion(work)
        append = work.conversation is not None or run.appends
        self._endings.completed(work, "finished", finished, now, append=append, large=large, output_bytes=output_bytes)

    def failed(self, subject: Subject, run_id: str, error: PenstockError, now: float, *, again: bool) -> None:
        """A run ended without output. `again`: the same run may succeed on this worker."""
        if (work := self._registry.of_run(subject, run_id, Stage.RUNNING)) is not None:
            self.attempt_failed(work, "failed", error, now, again=again)

    def timed_out(self, work: Work, error: PenstockError, now: float) -> None:
        """A run takes longer than it may."""
        self._holdings.stop_run(work)
        self.attempt_failed(work, "timeout", error, now, again=True)

    def turned_away(self, subject: Subject, run_id: str, error: PenstockError, now: float) -> None:
        """The server behind its engine did not take it: back to its place in the queue, without an attempt spent."""
        if (work := self._registry.of_run(subject, run_id, Stage.RUNNING)) is not None:
            work.failure = error.message
            self.requeue(work, "replica_down", now, error)

    def not_started(self, subject: Subject, run_id: str, now: float) -> None:
        """Its engine had gone when it was to start; `replica_down` follows, and it is not to blame for that."""
        if (work := self._registry.of_run(subject, run_id, Stage.RUNNING)) is not None:
            replica = self._lanes[work.lane].replica_of(work)
            if replica is not None:
                replica.busy_until = float("inf")
            self.requeue(work, "replica_down", now)

    def attempt_failed(self, work: Work, event: str, error: PenstockError, now: float, *, again: bool) -> None:
        """Run it again in place, dead-letter it, or say that it failed."""
        self._streams.remember(work)
        decision = self._retries.decide(work, error, now) if again else Fail()
        self._histories.failed(work, error, now)
        if isinstance(decision, Requeue | Retry) and work.stage in IN_SCHEDULER and not self._scheduler.eligible(work):
            # A turn of another class is under way: this one keeps its place in front of the later ones of its own.
            self._holdings.give_back(work)
            work.attempt += 1
            work.run = None
            self._registry.transition(work, event, Stage.QUEUED)
            return
        self._holdings.hold_conversation(work)
        self._holdings.give_back(work)
        if isinstance(decision, Requeue | Retry):
            self._registry.transition(work, event, Stage.RETRYING)
            self._statuses.say_at_once(work, "retrying", now, error.code)
            work.attempt += 1  # after that status: `running` of the next attempt is news to readers
            work.run = None
            self._emit(Retried(work.subject))
            self._holdings.drop_body_over_share(work)
            self._retries.add(work, decision.at)
        elif isinstance(decision, DeadLetter):
            self._endings.letter(work, event, error)
        else:
            self._endings.end(work, event, error, now)

    def requeue(self, work: Work, event: str, now: float, error: PenstockError | None = None) -> None:
        """Back to its place in the queue, without an attempt spent. `error` is what ended its run, if it ran."""
        if error is not None and work.stage is Stage.RUNNING:
            self._histories.failed(work, error, now)
        self._streams.remember(work)
        self._holdings.give_back(work)
        run, work.run = work.run, None
        if work.stage in ON_LANE:
            self._scheduler.put_back(work)
        published = work.published_status == "running"
        self._registry.transition(work, event, Stage.QUEUED)
        if published:
            self._statuses.say_at_once(work, "retrying", now, "engine_failed")
        self._statuses.say(work, "queued", now)  # if it lasts: with what it waits for; that it runs is not so any more
        if published or (run is not None and run.sent_pieces):
            work.attempt += 1  # readers must not mix its text and statuses with those that were published
        self._dirty.look_at(self._lanes[work.lane])
