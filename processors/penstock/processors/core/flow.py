"""The flow: every request of a worker from its arrival to its commit. Events in, effects out, time passed in.

A shell calls one method per event, then `step`, then carries out what `take_effects` gives. The flow decides what starts,
what is retried, what ends and what may be committed; it does no I/O and knows no clock. Its states and transitions stand
in `penstock.processors.core.states`. Model: websockets' `protocol.py` and vLLM's `schedule()` / `update_from_output()`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.processors.core import states
from penstock.processors.core.arrivals import Poison, Taken
from penstock.processors.core.budget import Budget
from penstock.processors.core.effects import (
    CancelRun,
    Effect,
    Ended,
    Erase,
    Fetch,
    Keep,
    Letter,
    Load,
    LookUp,
    Retried,
    SendHome,
    Status,
    Terminal,
)
from penstock.processors.core.gate import Arrival, CommitGate
from penstock.processors.core.lane import Lane, LaneState
from penstock.processors.core.retries import DeadLetter, Retry, decide
from penstock.processors.core.scheduler import Scheduler
from penstock.processors.core.starting import Starter
from penstock.processors.core.states import ENDING, IN_SCHEDULER, ON_LANE, Stage
from penstock.processors.core.statuses import Statuses
from penstock.processors.core.streams import Streams
from penstock.processors.core.suspects import accuse, acquit
from penstock.processors.core.work import Body, Run, Work, WorkKey
from penstock.schemas.errors import (
    Cancelled,
    EngineFailed,
    ExecutionTimeout,
    Expired,
    InternalError,
    PenstockError,
)
from penstock.schemas.records import ControlCommand, Requirements
from penstock.schemas.topics import CLASSES, priority_class

TP = tuple[str, int]

ENDINGS_PER_PARTITION = 512
"""Ends under way to the broker at which a partition pauses: a flood of what ends at once must not fill memory."""
ENDINGS_IN_ALL = 8192
"""Ends under way at which nothing more starts: the broker is away or slow."""
TOLD_WAITING = 64
FAILED_AT_ONCE = 256


class Catalog(Protocol):
    """Which lane serves a request."""

    def resolve(self, task: str, model: str | None) -> str:
        """The lane. Raises ModelNotFound."""
        ...

    def check_fits(self, lane: str, requirements: Requirements | None) -> None:
        """Raises InsufficientCapacity, naming need and capacity, for what can never fit."""
        ...


class Commands(Protocol):
    """The control topic as remembered."""

    def apply(self, command: ControlCommand, now_ms: int) -> bool: ...
    def cancelled(self, tenant: str, request_id: str) -> ControlCommand | None: ...
    def priority(self, tenant: str, request_id: str) -> int | None: ...
    def erasures(self) -> list[ControlCommand]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """Limits and lingers; seconds unless named otherwise."""

    aging_s: float = 20.0
    aged_share: int = 8
    commit_span: int = 50_000
    intake_bytes: int = 256 << 20
    chunk_linger_s: float = 0.03
    status_linger_s: float = 0.025
    max_execution_s: float = 900.0
    retry_delay_s: float = 0.05


class Flow:
    """One worker's requests. Not thread-safe; a second flow in the same process shares nothing with it."""

    def __init__(
        self,
        settings: FlowSettings,
        catalog: Catalog,
        commands: Commands,
        *,
        deaths: Callable[[WorkKey, str], int] = lambda key, request_id: 0,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._commands = commands
        self._deaths = deaths
        self._effects: list[Effect] = []
        self.gate = CommitGate(commit_span=settings.commit_span)
        self.scheduler = Scheduler(aging_s=settings.aging_s, aged_share=settings.aged_share)
        self.budget = Budget(settings.intake_bytes)
        self.streams = Streams(self._emit, settings.chunk_linger_s)
        self.statuses = Statuses(self._emit, settings.status_linger_s)
        self.starter = Starter(
            self.scheduler,
            self.statuses,
            self._emit,
            self._go,
            lambda: self.generation,
            max_execution_s=settings.max_execution_s,
        )
        self.lanes: dict[str, Lane] = {}
        self.works: dict[WorkKey, Work] = {}
        self._subjects: dict[tuple[str, str], Work] = {}
        self._seq = itertools.count(1)
        self._retries: list[tuple[float, int, Work]] = []
        self._endings: Counter[TP] = Counter()
        self._ends_under_way = 0
        self._paused: frozenset[TP] = frozenset()
        self._dirty: dict[str, Lane] = {}
        self.generation = -1
        self.taking = True
        self.transitions: set[states.Transition] | None = None
        """Set it to a set to have every transition noted (the simulator does)."""

    # -- effects

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """What the shell is to do, in order."""
        effects, self._effects = self._effects, []
        return effects

    def _go(self, work: Work, event: str, after: Stage) -> None:
        """The one place where a request changes its state. Raises IllegalTransition."""
        before = work.stage
        states.check(before, event, after)
        if self.transitions is not None:
            self.transitions.add((str(before), event, str(after)))
        work.stage = after
        if (after in ENDING) != (before in ENDING):
            change = 1 if after in ENDING else -1
            self._endings[work.tp] += change
            self._ends_under_way += change

    def lane(self, name: str) -> Lane:
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(name)
            self.budget.register(name)
        return lane

    # -- assignments

    def assigned(
        self, committed: Mapping[TP, tuple[int, str]], generation: int, *, fenced: bool, now: float
    ) -> None:
        """A new generation: what is not ours any more is let go of silently; after a fence everything is."""
        self.generation = generation
        revocation = self.gate.assign(committed, generation, fenced=fenced)
        if revocation.restart_all:
            gone = list(self.works.values())
        else:
            gone = [work for key in revocation.dropped if (work := self.works.get(key)) is not None]
            gone += [work for work in list(self.works.values()) if work.tp not in committed and work not in gone]
        for work in gone:
            self._drop(work)
        self.budget.assign(list(committed))
        self._paused = frozenset()
        for command in self._commands.erasures():
            self._emit(Erase(command))
        self._all_dirty()

    def _drop(self, work: Work) -> None:
        if work.stage in states.OVER:
            return
        journaled = work.started_at is not None
        self._stop_run(work)
        self._leave_waiting(work)
        self._go(work, "drop", Stage.DROPPED)
        if journaled:
            self._emit(Ended(work.key, work.request_id, dropped=True))
        self._forget(work)

    # -- arrivals

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
        if self.gate.arrive(tp, offset, _gate_id(read, key)) is not Arrival.NEW:
            return None
        if isinstance(read, Poison):
            return self._poison(key, read, value, headers, record_key, now)
        body = Body(read.request, value, headers, record_key, read.size_bytes)
        work = self._hold(key, read, body, now, wall_ms)
        if read.belongs_on is not None:
            self._go(work, "arrive_elsewhere", Stage.MOVING)
            self._emit(SendHome(work, read.belongs_on, read.origin))
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
        deadline = None if read.deadline_ms is None else now + (read.deadline_ms - wall_ms) / 1000
        work = Work(
            key=key,
            request_id=request.request_id,
            tenant=request.tenant,
            task=request.task,
            klass=read.klass,
            priority=request.priority,
            lane="",
            line=read.line,
            deadline_ms=read.deadline_ms,
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
        self.works[key] = work
        return work

    def _unfit(self, work: Work, read: Taken, wall_ms: int) -> PenstockError | None:
        """Why it must not run at all; else its lane is known."""
        cancel = self._commands.cancelled(work.tenant, work.request_id)
        if cancel is not None:
            return Cancelled(cancel.reason or "cancelled before it ran")
        if work.deadline_ms is not None and wall_ms >= work.deadline_ms:
            return Expired("its deadline passed before it was taken")
        try:
            work.lane = self._catalog.resolve(work.task, read.request.model)
            self._catalog.check_fits(work.lane, read.request.requirements)
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

    def _enqueue(self, work: Work, now: float) -> None:
        lane = self.lane(work.lane)
        work.counted = True
        self.budget.fact(work.tp)
        if self.budget.body(work.klass, work.lane, work.size_bytes):
            self._go(work, "arrive", Stage.QUEUED)
        else:
            work.body = None
            self._go(work, "arrive", Stage.PARKED)
        work.position = self.scheduler.up_to(work.klass)
        self.scheduler.add(work)
        self.statuses.say(work, "queued", now)
        self._touch(lane)

    # -- bytes that were parked

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
        self._go(work, "fetched", Stage.QUEUED)
        self._touch(self.lane(work.lane))

    def gone(self, key: WorkKey, now: float) -> None:
        """The record of a parked request is not there any more."""
        work = self.works.get(key)
        if work is None or work.stage is not Stage.FETCHING:
            return
        self.scheduler.remove(work)
        reason = work.end_with or InternalError("its record was deleted from the topic before its turn came")
        self._letter(work, "gone", reason)

    # -- preparing and beginning

    def prepared(self, work: Work, run_id: str, need_tokens: int, prepared: Any, now: float, mark: Any = None) -> None:
        """Its conversation was read and its prompt counted: it needs so many tokens of its engine."""
        run = self._current(work, run_id, Stage.PREPARING)
        if run is None:
            return
        run.need_tokens, run.prepared, run.mark = need_tokens, prepared, mark
        self._go(work, "prepared", Stage.READY)
        self._touch(self.lane(work.lane))

    def answer_stands(self, work: Work, run_id: str, finished: Any, now: float, *, large: bool) -> None:
        """The conversation holds its answer already (a worker died after appending it): it is the outcome."""
        if self._current(work, run_id, Stage.PREPARING) is not None:
            self._leave_waiting(work)
            self._completed(work, "answer_stands", finished, now, append=False, large=large)

    def refused(self, work: Work, run_id: str, error: PenstockError, now: float, *, again: bool) -> None:
        """It cannot be prepared, or its turn cannot begin."""
        if work.run is None or work.run.run_id != run_id or work.stage not in (Stage.PREPARING, Stage.BEGINNING):
            return
        self._failed(work, "refused", error, now, again=again)

    def begun(self, work: Work, run_id: str, now: float) -> None:
        """Its turn's input stands in the conversation."""
        run = self._current(work, run_id, Stage.BEGINNING)
        if run is not None:
            self.starter.run(work, run, "begun", now)

    def log_moved(self, work: Work, run_id: str, now: float) -> None:
        """Somebody else wrote to the conversation since it was read: its prompt is made anew."""
        if self._current(work, run_id, Stage.BEGINNING) is not None:
            self._requeue(work, "log_moved", now)

    # -- running

    def delta(self, work: Work, run_id: str, text: str, token_ids: list[int], now: float) -> None:
        run = work.run
        if run is not None and run.run_id == run_id and work.stage is Stage.RUNNING:
            self.streams.delta(work, run, text, token_ids, now)

    def finished(self, work: Work, run_id: str, finished: Any, now: float, *, large: bool) -> None:
        """The engine is done; `finished` is passed on untouched. `large`: its output must become an artifact."""
        run = self._current(work, run_id, Stage.RUNNING)
        if run is None:
            return
        if work.stream:
            self.streams.flush(work, run)
        lane = self.lane(work.lane)
        lane.survived()
        self._give_back(work)
        acquit(work)
        append = work.line is not None and work.task == "text_generation"
        self._completed(work, "finished", finished, now, append=append, large=large)

    def _completed(self, work: Work, event: str, finished: Any, now: float, *, append: bool, large: bool) -> None:
        if append or large:
            self._go(work, event, Stage.KEEPING)
            self._emit(Keep(work, finished, append))
        else:
            self._settle(work, event, now, finished=finished)

    def kept(self, work: Work, finished: Any, artifact: Any, now: float) -> None:
        """Its answer stands in the conversation; a large output is an artifact."""
        if work.stage is Stage.KEEPING:
            self._settle(work, "kept", now, finished=finished, artifact=artifact)

    def keep_failed(self, work: Work, error: PenstockError, now: float) -> None:
        """Its answer can never be kept."""
        if work.stage is Stage.KEEPING:
            self._settle(work, "kept", now, error=error)

    def failed(self, work: Work, run_id: str, error: PenstockError, now: float, *, again: bool) -> None:
        """A run ended without output. `again`: the same run may succeed on this worker."""
        if self._current(work, run_id, Stage.RUNNING) is not None:
            self._failed(work, "failed", error, now, again=again)

    def not_started(self, work: Work, run_id: str, now: float) -> None:
        """Its engine had gone when it was to start; `lane_down` follows, and it is not to blame for that."""
        if self._current(work, run_id, Stage.RUNNING) is not None:
            self.lane(work.lane).busy_until = float("inf")
            self._requeue(work, "lane_down", now)

    def _failed(self, work: Work, event: str, error: PenstockError, now: float, *, again: bool) -> None:
        """Run it again in place, dead-letter it, or say that it failed."""
        self._hold_line(work, now)
        self._give_back(work)
        decision = decide(error, work.spent, work.max_attempts, now, None) if again else None
        if isinstance(decision, Retry):
            work.attempt += 1
            work.spent += 1
            work.run = None
            self._go(work, event, Stage.RETRYING)
            self._emit(Retried(work))
            self.statuses.say_at_once(work, "retrying", error.code)
            due = now + max(decision.delay_s, self._settings.retry_delay_s)
            heapq.heappush(self._retries, (due, work.seq, work))
        elif isinstance(decision, DeadLetter):
            self._letter(work, event, error)
        else:
            self._settle(work, event, now, error=error)

    def _requeue(self, work: Work, event: str, now: float) -> None:
        """Back to its place in the queue, without an attempt spent."""
        self._give_back(work)
        run, work.run = work.run, None
        if run is not None and run.sent_pieces:
            work.attempt += 1  # readers must be able to tell the new words from those that were published
        if work.stage in ON_LANE:
            self.scheduler.put_back(work)
        told = work.published_status is not None
        self._go(work, event, Stage.QUEUED)
        if told:
            self.statuses.say_at_once(work, "retrying", "engine_failed")
        self._touch(self.lane(work.lane))

    def _retry_due(self, now: float) -> None:
        while self._retries and self._retries[0][0] <= now:
            _, _, work = heapq.heappop(self._retries)
            if work.stage is Stage.RETRYING:
                self.scheduler.put_back(work)
                self._go(work, "due", Stage.QUEUED)
                self._touch(self.lane(work.lane))

    # -- lanes

    def lane_up(self, name: str, slots: int, tokens: int | None, now: float, *, inline: bool) -> None:
        """The lane's model is loaded: it runs so many at once, in so many tokens of cache (None: no such limit)."""
        lane = self.lane(name)
        lane.up(slots, tokens, inline=inline, now=now)
        self._touch(lane)

    def want(self, name: str) -> None:
        """Load the lane's model, whether somebody waits for it or not."""
        lane = self.lane(name)
        lane.wanted = True
        self._touch(lane)

    def lane_down(self, name: str, now: float) -> None:
        """The lane's engine died, or was unloaded. What ran on it runs again; who killed it is found by halves."""
        lane = self.lane(name)
        running = [work for work in lane.holders if work.stage is Stage.RUNNING]
        victims = running or [work for work in lane.ahead if work.stage is Stage.PREPARING]
        lane.down(now, with_work=bool(victims))
        culprit = accuse(victims)
        lane.exclusive = None
        for work in [*lane.holders, *lane.ahead]:
            if work is not culprit:
                self._requeue(work, "lane_down", now)
        if culprit is not None:
            culprit.spent = max(culprit.spent, min(culprit.deaths, culprit.max_attempts))
            error = EngineFailed("the engine's process died while it ran")
            self._failed(culprit, "lane_down", error, now, again=True)
        self._unset_alone(name)
        self._touch(lane)

    def lane_unloaded(self, name: str, now: float) -> None:
        """The lane's model was taken away on purpose: nobody is to blame."""
        lane = self.lane(name)
        lane.state, lane.wanted = LaneState.ABSENT, False
        lane.exclusive = None
        for work in [*lane.holders, *lane.ahead]:
            self._requeue(work, "lane_down", now)
        self._unset_alone(name)
        self._touch(lane)

    def lane_busy(self, name: str, seconds: float, now: float) -> None:
        """The lane's engine takes nothing new for so long."""
        lane = self.lane(name)
        lane.busy_until = max(lane.busy_until, now + seconds)

    def load_failed(self, name: str, error: BaseException, now: float) -> None:
        """The lane's model could not be loaded; those who wait hear of it when waiting is of no more use."""
        lane = self.lane(name)
        known = lane.load_failed(error, now)
        if known is not None:
            lane.fail_error, lane.fail_through = known, next(self._seq)
            lane.wanted = False
        self._unset_alone(name)
        self._touch(lane)

    def _unset_alone(self, lane: str) -> None:
        alone = self.starter.alone
        if alone is not None and alone.lane == lane:
            self.starter.alone = None

    def _fail_waiting(self, lane: Lane, now: float) -> bool:
        """End who waited when the load failed, some at a time; whether more may wait."""
        error = lane.fail_error
        if error is None:
            return False
        waiting = [
            work
            for work in itertools.islice(self.scheduler.candidates(lane.name, now), FAILED_AT_ONCE)
            if work.seq <= lane.fail_through
        ]
        waiting += [work for _, _, work in self._retries if work.lane == lane.name and work.stage is Stage.RETRYING]
        for work in waiting:
            self._end_waiting(work, "lane_failed", error, now)
        if not waiting:
            lane.fail_error = None
        return bool(waiting)

    # -- endings

    def looked_up(self, work: Work, finished: Any | None, now: float, *, large: bool = False) -> None:
        """The answer that stands in the conversation of a request that was to end unrun, or None."""
        if work.stage is not Stage.LOOKING:
            return
        if finished is not None:
            self._completed(work, "looked_up", finished, now, append=False, large=large)
        else:
            self._settle(work, "looked_up", now, error=work.end_with)

    def moved(self, work: Work) -> None:
        """Its record stands on the partition of its conversation."""
        if work.stage is Stage.MOVING:
            self._go(work, "moved", Stage.DONE)
            self._complete(work)

    def cannot_move(self, work: Work, error: PenstockError) -> None:
        """Its record cannot be written again."""
        if work.stage is Stage.MOVING:
            self._letter(work, "unmovable", error)

    def lettered(self, work: Work, now: float) -> None:
        """The broker has its dead letter."""
        if work.stage is not Stage.LETTERING:
            return
        if work.request_id:
            status = _status_of(work.end_with) if work.end_with is not None else "dead_lettered"
            self._settle(work, "lettered", now, error=work.error, status=status)
        else:
            self._go(work, "lettered", Stage.DONE)
            self._complete(work)

    def delivered(self, work: Work, status: str) -> None:
        """The broker has its terminal event: its offset may be committed."""
        if work.stage is not Stage.SETTLING:
            return
        self._go(work, "delivered", Stage.DONE)
        if work.started_at is not None:
            self._emit(Ended(work.key, work.request_id, dropped=False))
        self._complete(work)
        self._emit(Status(work, status, done=True))

    def chunk_refused(self, work: Work, now: float) -> None:
        """A piece of its stream can never be published: the whole could not either."""
        if work.stage is Stage.RUNNING:
            self._stop_run(work)
            error = InternalError("a piece of the output cannot be published")
            self._settle(work, "failed", now, error=error)

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
        status = status or ("completed" if error is None else _status_of(error))
        self._go(work, event, Stage.SETTLING)
        work.pending_status = status
        self._emit(Terminal(work, status, now, error, finished, artifact))

    def _letter(self, work: Work, event: str, error: PenstockError) -> None:
        work.error = error
        self._go(work, event, Stage.LETTERING)
        self._emit(Letter(work, error, nameless=not work.request_id))

    def _end_unrun(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End what did not run here; a turn only if it has no answer from a worker that died before it could say so."""
        if work.line is None:
            self._settle(work, event, now, error=error)
        else:
            work.end_with = error
            self._go(work, event, Stage.LOOKING)
            self._emit(LookUp(work))

    def _end_waiting(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        """End what waits in the scheduler, or for a retry; what is parked is read first, for what its outcome echoes."""
        if work.stage is Stage.FETCHING:
            work.end_with = work.end_with or error
            self.scheduler.remove(work)
        elif work.stage is Stage.PARKED:
            work.end_with = error
            self.scheduler.remove(work)
            self._go(work, "fetch", Stage.FETCHING)
            self._emit(Fetch(work.tp, (work.key[2],), len(CLASSES)))
        elif work.stage is Stage.RETRYING:
            self._settle(work, event, now, error=error)
        else:
            self._leave_waiting(work)
            if event == "lane_failed":
                self._settle(work, event, now, error=error)
            else:
                self._end_unrun(work, event, error, now)

    def _end_running(self, work: Work, event: str, error: PenstockError, now: float) -> None:
        run = work.run
        if work.stage is Stage.RUNNING and work.stream and run is not None:
            self.streams.flush(work, run)
        self._stop_run(work)
        self._settle(work, event, now, error=error)

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
        if work.counted:
            self.budget.drop_fact(work.tp)
            if work.body is not None:
                self.budget.drop_body(work.klass, work.lane, work.size_bytes)
        acquit(work)
        if work.line is not None and work.lane:
            self.scheduler.release_line(work.line)
            self._touch(self.lane(work.lane))

    def _stop_run(self, work: Work) -> None:
        """Its engine need not go on, and what it held comes back."""
        if work.run is not None and work.stage in (Stage.PREPARING, Stage.READY, Stage.BEGINNING, Stage.RUNNING):
            self._emit(CancelRun(work.lane, work.run.run_id))
        self._give_back(work)

    def _leave_waiting(self, work: Work) -> None:
        """Out of the scheduler, if it is there."""
        if work.stage in IN_SCHEDULER:
            self._stop_run(work)
            self.scheduler.remove(work)

    def _hold_line(self, work: Work, now: float) -> None:
        """Out of the scheduler, but its conversation waits for it: its next attempt runs in place."""
        if work.stage in IN_SCHEDULER:
            self.scheduler.start(work, now)

    def _give_back(self, work: Work) -> None:
        if work.lane:
            lane = self.lane(work.lane)
            self.starter.leave(lane, work)
            self._touch(lane)

    def _current(self, work: Work, run_id: str, stage: Stage) -> Run | None:
        """The run that an answer speaks of; None when it is over."""
        run = work.run
        return run if run is not None and run.run_id == run_id and work.stage is stage else None

    # -- commands

    def command(self, command: ControlCommand, now: float, wall_ms: int) -> None:
        """A command from the control topic, in log order."""
        if not self._commands.apply(command, wall_ms):
            return
        work = self._subjects.get((command.tenant, command.request_id))
        if command.kind == "erase":
            self._emit(Erase(command))
        elif work is None:
            return
        elif command.kind == "cancel":
            self._cancel(work, Cancelled(command.reason or "cancelled by its caller"), now)
        elif command.kind == "reprioritize" and command.priority is not None and work.stage in IN_SCHEDULER:
            self._reprioritize(work, command.priority)

    def _cancel(self, work: Work, error: Cancelled, now: float) -> None:
        if work.stage in IN_SCHEDULER or work.stage is Stage.RETRYING:
            self._end_waiting(work, "cancel", error, now)
        elif work.stage in ON_LANE:
            self._end_running(work, "cancel", error, now)

    def _reprioritize(self, work: Work, priority: int) -> None:
        klass = priority_class(priority)
        if work.body is not None:
            self.budget.drop_body(work.klass, work.lane, work.size_bytes)
            self.budget.keep_body(klass, work.lane, work.size_bytes)
        if self.scheduler.reprioritize(work, klass, priority):
            self._touch(self.lane(work.lane))

    # -- time

    def step(self, now: float) -> None:
        """Start what can start, on every lane where something changed."""
        while self._dirty and self.taking:
            name, lane = next(iter(self._dirty.items()))
            del self._dirty[name]
            self._look(lane, now)

    def _look(self, lane: Lane, now: float) -> None:
        if lane.fail_error is not None and self._fail_waiting(lane, now):
            self._touch_later(lane)
        if self._ends_under_way >= ENDINGS_IN_ALL:
            return
        if lane.state is LaneState.UP:
            self.starter.fill(lane, now)
        elif lane.wanted or lane.name in self.scheduler.lanes():
            if lane.state is LaneState.ABSENT and now >= lane.not_before:
                lane.load(now)
                self._emit(Load(lane.name))
            status = "waiting_for_memory" if lane.short else "loading_model"
            for work in itertools.islice(self.scheduler.candidates(lane.name, now), TOLD_WAITING):
                self.statuses.say(work, status, now)

    def tick(self, now: float, wall_ms: int) -> None:
        """What is due by time. Call it every 10 ms or so while there is work, and at `next_due`."""
        self.statuses.tick(now)
        self.streams.tick(now)
        self._retry_due(now)
        if not self.taking:
            return
        for work in self.scheduler.expired(now):
            self._end_waiting(work, "expire", Expired("its deadline passed while it waited"), now)
        for _, _, work in self._retries:
            if work.stage is Stage.RETRYING and work.deadline is not None and work.deadline <= now:
                self._end_waiting(work, "expire", Expired("its deadline passed while it waited to run"), now)
        self._all_dirty()

    def check_timeouts(self, now: float) -> None:
        """End runs that take longer than they may; call it a few times a second."""
        for lane in self.lanes.values():
            for work in [w for w in lane.holders if w.stage is Stage.RUNNING]:
                run = work.run
                if run is not None and run.timeout_at is not None and run.timeout_at <= now:
                    took = now - (run.run_at or now)
                    self._end_running(work, "timeout", ExecutionTimeout(f"the run took longer than {took:.1f} s"), now)

    def next_due(self) -> float | None:
        """When the next status, chunk or retry is due."""
        times = [self.statuses.next_due(), self.streams.next_due(), self._retries[0][0] if self._retries else None]
        return min((at for at in times if at is not None), default=None)

    def tell_positions(self, count: int) -> None:
        """Who is near the front and waits for long hears how the queue moves."""
        for position, work in enumerate(self.scheduler.front(count)):
            if work.position != position:
                work.position = position
                self.statuses.moved_up(work)

    def _touch(self, lane: Lane) -> None:
        self._dirty[lane.name] = lane

    def _touch_later(self, lane: Lane) -> None:
        """At the next tick: what was asked for takes its time."""
        lane.look_due = True

    def _all_dirty(self) -> None:
        for lane in self.lanes.values():
            lane.look_due = True
            self._dirty[lane.name] = lane

    # -- what the consumer should do

    def pauses(self) -> frozenset[TP]:
        """Partitions of which no more should be delivered now; two watermarks keep it from flapping."""
        paused: set[TP] = set()
        for tp in self.gate.partitions():
            was = tp in self._paused
            most = ENDINGS_PER_PARTITION // 2 if was else ENDINGS_PER_PARTITION
            if self._endings[tp] >= most or self.gate.full(tp) or self.budget.full(tp):
                paused.add(tp)
        self._paused = frozenset(paused)
        return self._paused

    # -- stopping

    def stop_taking(self) -> None:
        """From here on nothing is started. What waits is handed back unsaid; what runs may finish."""
        self.taking = False
        for work in [w for w in self.works.values() if w.stage in IN_SCHEDULER or w.stage is Stage.RETRYING]:
            self._drop(work)

    def hand_back(self) -> None:
        """Let go of what still runs; it stays uncommitted and begins anew elsewhere."""
        for work in [w for w in self.works.values() if w.stage is not Stage.SETTLING]:
            self._drop(work)

    @property
    def running(self) -> int:
        return self.starter.on_lanes

    def unfinished(self) -> Collection[Work]:
        return self.works.values()


def _gate_id(read: Taken | Poison, key: WorkKey) -> str:
    """What names the work in the gate: the same request at a second offset is held back, except on its way home."""
    if isinstance(read, Poison):
        return f"poison {key}"
    if read.belongs_on is not None:
        return f"moved {key}"
    return f"{read.request.tenant}/{read.request.request_id}"


def _status_of(error: PenstockError) -> str:
    return {"cancelled": "cancelled", "expired": "expired", "dead_lettered": "dead_lettered"}.get(error.code, "failed")
