"""The worker's shell: carries records and answers into the flow and its effects out. It decides nothing.

All of it runs on one event loop. One turn of the shell takes some records, lets the flow look, and carries out what it
asks for; then the loop may serve others. One ticker serves every timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, cast

from penstock.common.clock import now_ms
from penstock.common.reader import RawMessage
from penstock.common.refetch import Refetcher
from penstock.processors.core import effects as ask
from penstock.processors.core.flow import Flow
from penstock.processors.core.intake.arrivals import Poison
from penstock.processors.core.intake.intake import Intake
from penstock.processors.core.work.work import Body, Subject
from penstock.processors.execution import Execution
from penstock.processors.faults import Faults
from penstock.processors.inbox import LONG, Inbox
from penstock.processors.kafka.batches import Assignment, Batch, DeliveredRecord
from penstock.processors.kafka.journal import CrashJournal, JournalWriter
from penstock.processors.kafka.outcomes import Outcomes
from penstock.processors.kafka.publisher import Publisher
from penstock.processors.lanes import LaneShell
from penstock.processors.metrics import Metrics
from penstock.processors.request_traces import RequestTraces
from penstock.schemas.errors import BadAvro, PenstockError, RegistryUnavailable
from penstock.schemas.records import ControlCommand, WorkerState
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

P = ParamSpec("P")
TICK_S = 0.01
IDLE_TICK_S = 1.0
"""While nothing is held only a model that is loaded again after a failure is due by time."""
SLOW_TICK_S = 0.1
POSITIONS_S = 1.0
"""How often those near the front hear of their position in the queue."""
POSITIONS_TOLD = 64
RECORDS_A_TURN = 128
"""How many records are taken before the flow looks what they change."""
REGISTRY_AGAIN_S = 1.0
EFFECTS_A_TURN = 500
"""How many effects are carried out before the loop may serve others."""
PLANTED_S = 30.0
"""So late comes an outcome whose offset the planted defect has committed: a test that looks for a loss kills before."""


def _breaking(method: Callable[P, None]) -> Callable[P, None]:
    """What is called from elsewhere and raises is a fault of ours: the worker must not go on half alive."""

    @wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("worker.event_failed kind=%s", method.__name__)
            cast("Worker", args[0]).break_down()

    return guarded


@dataclass(slots=True)
class WorkerParts:
    """The parts that the worker moves data between; made in assembly.py."""

    flow: Flow
    intake: Intake
    execution: Execution
    outcomes: Outcomes
    publisher: Publisher
    refetcher: Refetcher
    lanes: LaneShell
    journal: CrashJournal
    journal_writer: JournalWriter
    metrics: Metrics
    faults: Faults
    traces: RequestTraces | None = None
    """None while traces are off."""


class Worker:
    """Not thread-safe: all calls on the loop.

    `urgency` of a topic: lower is taken first. `hold` pauses exactly these partitions. `on_broken` is called when this
    process can do no good any more.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        urgency: Callable[[str], int],
        hold: Callable[[frozenset[TP]], None],
        on_erase: Callable[[ask.Erase], None],
        on_broken: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._hold = hold
        self._on_erase = on_erase
        self._on_broken = on_broken
        self._inbox = Inbox(urgency)
        self._held: frozenset[TP] = frozenset()
        self._effects: deque[ask.Effect] = deque()
        self._turn_due = False
        self.broken = False
        """Whether a fault of its own ended it. What ran then may be to blame for the fault."""
        self._holds_work = asyncio.Event()
        """Set when a turn leaves work: it wakes a ticker that found none."""
        self._parts: WorkerParts
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            ask.Prepare: lambda e: self._parts.execution.prepare(e),
            ask.Begin: lambda e: self._parts.execution.begin(e),
            ask.Start: self._start,
            ask.CancelRun: lambda e: self._parts.execution.cancel(e.lane, e.replica, e.run_id),
            ask.StoreOutput: lambda e: self._parts.execution.keep(e),
            ask.CheckForAnswer: lambda e: self._parts.execution.look_up(e),
            ask.Status: self._status,
            ask.Chunk: self._chunk,
            ask.ShowPreview: lambda e: self._parts.execution.show_preview(e, self._parts.outcomes.preview),
            ask.Terminal: self._terminal,
            ask.PublishDeadLetter: self._letter,
            ask.Republish: self._republish,
            ask.Size: lambda e: self._parts.lanes.size(e),
            ask.Load: lambda e: self._parts.lanes.load(e),
            ask.Unload: lambda e: self._parts.lanes.unload(e),
            ask.Fetch: lambda e: self._parts.refetcher.request(e.tp, e.offsets, e.urgency),
            ask.RunEnded: self._run_ended,
            ask.AttemptEnded: lambda e: self._parts.journal.attempt_ended(e.key, e.request_id, e.attempt),
            ask.ForgetDeaths: lambda e: self._parts.journal.forget_deaths(e.key, e.request_id),
            ask.Erase: self._on_erase,
            ask.Retried: lambda e: self._parts.metrics.retries.inc(),
        }

    def connect(self, parts: WorkerParts) -> None:
        """Give the worker its rooms; they need the worker's callbacks, so they are made after it."""
        self._parts = parts

    def on_batch(self, batch: Batch) -> None:
        """Records of one partition. Never waits."""
        self._parts.faults.hit("intake")
        if self._parts.flow.taking and not self.broken:
            self._inbox.put(batch)
            self.changed()

    def on_assigned(self, assignment: Assignment) -> None:
        """A new generation. What was delivered under the old one and not taken is delivered again."""
        gone = self._inbox.clear()
        kept = list(self._parts.flow.commit.partitions())
        let_go = self._parts.flow.assigned(
            assignment.committed,
            assignment.generation,
            fenced=assignment.fenced,
            now=self._clock(),
            wall_ms=now_ms(),
        )
        self._forget(let_go)
        self._apply_pauses()  # the consumer keeps its pauses over a rebalance
        for tp in set(kept) - set(assignment.committed):
            self._parts.refetcher.cancel(tp)
        logger.info("worker.assigned generation=%d untaken=%d", assignment.generation, gone)
        self.changed()

    def _forget(self, let_go: frozenset[int]) -> None:
        """What was to be said of requests that were let go of is not said."""
        effects = (*self._effects, *self._parts.flow.take_effects())
        self._effects = deque(one for one in effects if (of := _subject(one)) is None or of.seq not in let_go)
        if self._parts.traces is not None:
            self._parts.traces.forget(let_go)

    @_breaking
    def on_commands(self, commands: Sequence[ControlCommand]) -> None:
        """Commands from the control topic, in log order."""
        now, wall_ms = self._clock(), now_ms()
        for command in commands:
            self._parts.flow.command(command, now, wall_ms)
        self.changed()

    @_breaking
    def on_reports(self, reports: Sequence[WorkerState]) -> None:
        """What workers report of themselves, in log order."""
        self._parts.flow.peers.reported(reports)
        self.changed()

    @_breaking
    def on_fetched(self, tp: TP, records: list[RawMessage]) -> None:
        """Parked records that were read again."""
        for record in records:
            key = (*tp, record.offset)
            try:
                read = self._read(tp, record)
            except RegistryUnavailable:  # it was readable before: it is asked for once more
                again = partial(self._parts.refetcher.request, tp, (record.offset,))
                asyncio.get_running_loop().call_later(REGISTRY_AGAIN_S, again)
                continue
            self._parts.flow.arrivals.fetched(key, read, _body(read, record), self._clock())
        self.changed()

    @_breaking
    def on_gone(self, tp: TP, offsets: list[int]) -> None:
        """Parked records that are not on their topic any more."""
        for offset in offsets:
            self._parts.flow.arrivals.gone((*tp, offset), self._clock())
        self.changed()

    def changed(self) -> None:
        """An event went into the flow: take a turn, soon."""
        if not self._turn_due:
            self._turn_due = True
            asyncio.get_running_loop().call_soon(self._turn_or_break)

    def _turn_or_break(self) -> None:
        self._turn_due = False
        try:
            self._turn()
        except Exception:  # a fault of ours: if this worker went on half alive, its requests would wait for ever
            logger.exception("worker.turn_failed")
            self.break_down()

    def break_down(self) -> None:
        """A fault of ours: nothing more is taken or started, and what ran counts as having died with this worker."""
        self.broken = True
        self._on_broken()

    def _turn(self) -> None:
        if self.broken:
            return
        took = self._take_some()
        self._parts.flow.chunks_under_way(self._parts.publisher.chunk_bytes)
        self._parts.flow.step(self._clock())
        more = self._carry_out()
        if self._parts.flow.works:
            self._holds_work.set()
        if took or self._inbox.aside:
            self._apply_pauses()
        if more or (took and self._inbox):
            self.changed()

    def _take_some(self) -> int:
        """Take some records, the more urgent topics first. Returns how many."""
        now = self._clock()
        if not self._parts.flow.taking:
            return 0
        taken = 0
        while taken < RECORDS_A_TURN and (pending := self._inbox.first(now)) is not None:
            batch = pending.batch
            if not pending.announced:
                pending.announced = True
                offsets = [record.offset for record in batch.records]
                self._parts.flow.commit.delivered(batch.tp, batch.start, batch.end, offsets)
            records = batch.records[pending.at : pending.at + RECORDS_A_TURN - taken]
            for record in records:
                try:
                    self._take(batch.tp, record)
                except RegistryUnavailable as error:
                    if self._inbox.set_aside(pending, now) == LONG:
                        logger.warning(
                            "intake.registry_unavailable topic=%s partition=%d error=%s: it waits", *batch.tp, error
                        )
                    break
                self._inbox.was_read(pending)
                pending.at += 1
                taken += 1
            if pending.at >= len(batch.records):
                self._inbox.done(pending)
        return taken

    def _take(self, tp: TP, record: DeliveredRecord) -> None:
        read = self._read(tp, record)
        if isinstance(read, Poison) and read.fault is not None:
            logger.error("intake.unreadable topic=%s partition=%d offset=%d", *tp, record.offset, exc_info=read.fault)
        body, former = _body(read, record), self._parts.flow.works.get((*tp, record.offset))
        work = self._parts.flow.arrived(tp, record.offset, read, body, self._clock(), now_ms())
        if work is not None and former is not None:
            self._forget(frozenset((former.number,)))
        if work is not None and self._parts.traces is not None:
            self._parts.traces.arrived(work.subject, body)

    def _read(self, tp: TP, record: DeliveredRecord | RawMessage) -> Any:
        """Raises RegistryUnavailable."""
        return self._parts.intake.read(
            tp[0], tp[1], record.offset, record.timestamp_ms, record.headers, record.value, record.key
        )

    def _carry_out(self) -> bool:
        """Do what the flow asks, and what it asks because of that. True when something is left for the next turn."""
        flow, queue, handlers = self._parts.flow, self._effects, self._handlers
        queue.extend(flow.take_effects())
        for _ in range(EFFECTS_A_TURN):
            if not queue:
                flow.step(self._clock())
                queue.extend(flow.take_effects())
                if not queue:
                    return False
            effect = queue.popleft()
            try:
                handlers[type(effect)](effect)
            except Exception:
                self._blame(effect)
                raise
            queue.extend(flow.take_effects())
        return True

    def _blame(self, effect: ask.Effect) -> None:
        """What was done for a request broke this worker: that counts as if it had run, or it would break each one."""
        subject = _subject(effect)
        if subject is not None:
            self._parts.journal.started(subject.first_key, subject.request_id, subject.attempt)

    def _apply_pauses(self) -> None:
        wanted = self._parts.flow.pauses() | self._inbox.aside
        if wanted != self._held:
            self._held = wanted
            self._hold(wanted)

    def _start(self, effect: ask.Start) -> None:
        subject = effect.subject
        self._parts.journal.started(subject.first_key, subject.request_id, subject.attempt)
        if effect.inline:
            self._parts.execution.start(effect)
        else:  # an engine that runs elsewhere can take the worker with it
            self._parts.journal_writer.flush(lambda: self._journaled(effect))

    @_breaking
    def _journaled(self, effect: ask.Start) -> None:
        if not self.broken:
            self._parts.execution.start(effect)
            self.changed()

    def _status(self, effect: ask.Status) -> None:
        if self._parts.traces is not None:
            self._parts.traces.status(effect)
        self._parts.outcomes.status(effect)

    def _chunk(self, effect: ask.Chunk) -> None:
        faults = self._parts.faults
        acknowledged = (lambda: faults.hit("mid_stream")) if faults.armed("mid_stream") else None
        self._parts.outcomes.chunk(effect, acknowledged, lambda: self._chunk_refused(effect.subject))

    @_breaking
    def _chunk_refused(self, subject: Subject) -> None:
        self._parts.flow.durable.chunk_refused(subject, self._clock())
        self.changed()

    def _terminal(self, effect: ask.Terminal) -> None:
        faults = self._parts.faults
        faults.hit("before_terminal")
        if self._parts.traces is not None and effect.origin is None:
            self._parts.traces.ended(effect)
        if faults.armed("commit_first"):
            loop = asyncio.get_running_loop()
            loop.call_soon(self._delivered, effect, effect.status)
            loop.call_later(PLANTED_S, lambda: self._parts.outcomes.terminal(effect, lambda status: None))
            return
        self._parts.outcomes.terminal(effect, lambda status: self._delivered(effect, status))

    @_breaking
    def _delivered(self, effect: ask.Terminal, status: str) -> None:
        self._parts.faults.hit("before_commit")
        if self._parts.flow.published(effect.subject, status):
            waited_s = (effect.timings.queued_ms + effect.timings.load_ms) / 1000
            subject = effect.subject
            self._parts.metrics.outcome(
                subject.task, status, effect.klass, subject.lane, waited_s=waited_s, ran_s=effect.ran_s
            )
            if effect.origin is None:
                self._parts.outcomes.acknowledged(effect, status)
                if self._parts.traces is not None:
                    self._parts.traces.acknowledged(effect, status)
            self.changed()

    def _letter(self, effect: ask.PublishDeadLetter) -> None:
        self._parts.metrics.dead_letters.labels(effect.error.code).inc()
        self._parts.outcomes.letter(effect, lambda: self._lettered(effect.subject))

    @_breaking
    def _lettered(self, subject: Subject) -> None:
        self._parts.flow.dead_lettered(subject, self._clock())
        if self._parts.traces is not None and not subject.request_id:  # it has no outcome
            self._parts.traces.forget((subject.seq,))
        self.changed()

    def _republish(self, effect: ask.Republish) -> None:
        try:
            self._parts.outcomes.republish(
                effect, lambda: self._moved(effect.subject), lambda error: self._cannot_move(effect.subject, error)
            )
        except BadAvro as error:
            self._cannot_move(effect.subject, error)

    @_breaking
    def _cannot_move(self, subject: Subject, error: PenstockError) -> None:
        self._parts.flow.durable.cannot_move(subject, error, self._clock())
        self.changed()

    @_breaking
    def _moved(self, subject: Subject) -> None:
        self._parts.flow.moved(subject)
        if self._parts.traces is not None:
            self._parts.traces.forget((subject.seq,))
        self.changed()

    def _run_ended(self, effect: ask.RunEnded) -> None:
        if not self.broken:  # what ran when this worker broke may be what broke it
            self._parts.journal.ended(effect.key, effect.request_id)

    async def tick_forever(self) -> None:
        """The one ticker: does everything that is due by time, for all requests."""
        next_slow = next_positions = 0.0
        flow = self._parts.flow
        while True:
            await self._sleep_until_due()
            now = self._clock()
            self._parts.publisher.tick()
            flow.tick(now, now_ms())
            self._parts.journal_writer.flush()
            if now >= next_slow:
                next_slow = now + SLOW_TICK_S
                flow.check_timeouts(now)
                self._apply_pauses()
            if now >= next_positions:
                next_positions = now + POSITIONS_S
                flow.publish_positions(POSITIONS_TOLD)
            self.changed()

    async def _sleep_until_due(self) -> None:
        """At most for a tick; for longer while all that is held waits for its time to start, until work comes."""
        idle = len(self._parts.flow.works) == len(self._parts.flow.registry.scheduled) and not self._inbox
        due = self._parts.flow.next_due()
        longest_s = IDLE_TICK_S if idle else TICK_S
        seconds = longest_s if due is None else min(longest_s, max(0.001, due - self._clock()))
        if not idle:
            await asyncio.sleep(seconds)
            return
        self._holds_work.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._holds_work.wait()

    def stop_taking(self) -> None:
        """From here on nothing is taken or started. What is queued is handed back, and nothing is published of that."""
        self._inbox.clear()
        self._parts.flow.stop_taking()
        self.changed()

    def hand_back(self) -> None:
        """Let go of what still runs. It stays uncommitted, so another worker begins it again."""
        self._parts.flow.hand_back()
        self.changed()

    @property
    def has_room(self) -> bool:
        """Whether intake would take more: the stall watchdog counts only then."""
        return self._parts.flow.taking

    @property
    def registry_waits(self) -> bool:
        """Whether a partition waits for a schema registry that does not answer, also while it is asked again."""
        return self._inbox.waits_long


def _subject(effect: ask.Effect) -> Subject | None:
    """The request that an effect is about, if it is about one."""
    return getattr(effect, "subject", None)


def _body(read: Any, record: DeliveredRecord | RawMessage) -> Body:
    return Body(read.request, record.value or b"", record.headers, record.key)
