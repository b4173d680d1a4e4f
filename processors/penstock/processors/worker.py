"""The worker's centre: takes records, holds works, gives them out as engines have room, lets go what is not its own.

All of it runs on one event loop and awaits nothing per message. One shared ticker serves every timer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.processors.core.gate import Arrival, CommitGate
from penstock.processors.core.scheduler import Decision, Item, Scheduler
from penstock.processors.kafka.control import ControlBook
from penstock.processors.kafka.intake import Intake, Poison, Taken, origin_header
from penstock.processors.kafka.journal import CrashJournal
from penstock.processors.kafka.membership import Assignment
from penstock.processors.kafka.publisher import Publisher
from penstock.processors.lanes import Lanes
from penstock.processors.metrics import Metrics
from penstock.processors.outcomes import Outcomes, now_ms
from penstock.processors.runs import Runs
from penstock.processors.work import Stage, Work, WorkKey
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BadAvro, Cancelled, EngineFailed, Expired, PenstockError, RegistryUnavailable
from penstock.schemas.records import ControlCommand, InferenceRequest
from penstock.schemas.topics import priority_class

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 0.002
HOUSEKEEPING_WORKS = 8
TICK_S = 0.01
SLOW_TICK_S = 0.1
POSITIONS_S = 1.0
POSITIONS_TOLD = 64


@dataclass(slots=True)
class Rooms:
    """The parts that the worker moves data between; made in app.py."""

    intake: Intake
    gate: CommitGate
    scheduler: Scheduler
    lanes: Lanes
    outcomes: Outcomes
    runs: Runs
    publisher: Publisher
    control: ControlBook
    journal: CrashJournal
    metrics: Metrics
    codec: Codec


class Worker:
    """Holds every request between its arrival and its commit. Not thread-safe: all calls on the loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[frozenset[tuple[str, int]]], None],
        on_erase: Callable[[ControlCommand], None] = lambda _: None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_broken = on_broken
        self._clock = clock
        self._pause = pause
        self._on_erase = on_erase
        self._works: dict[WorkKey, Work] = {}
        self._subjects: dict[tuple[str, str], Work] = {}
        self._originals: dict[WorkKey, tuple[bytes, dict[str, bytes]]] = {}
        self._held: deque[Any] = deque()
        self._generation = -1
        self._partitions: frozenset[tuple[str, int]] = frozenset()
        self._dispatch_due = False
        self._housekept_at = 0.0
        self._checked_inflight = 0
        self._taking = True
        self._broken = False
        self._alone: Work | None = None
        self._r: Rooms

    def connect(self, rooms: Rooms) -> None:
        """Give the worker its rooms; they need the worker's callbacks, so they are made after it."""
        self._r = rooms

    # -- taking

    def on_event(self, event: Any) -> None:
        """One Faust event. Never waits; what is not taken stays uncommitted and is delivered again."""
        if not self._taking:
            return
        if self._held:
            self._held.append(event)
            return
        try:
            self._take(event)
        except RegistryUnavailable as error:
            logger.warning("intake.registry_unavailable error=%s: intake is paused", error)
            self._held.append(event)
            self._pause(self._partitions)
        except Exception:  # raised through, Faust would restart the agent and commit past the record
            logger.exception("worker.take_failed")
            self._break()

    def _take(self, event: Any) -> None:
        message = event.message
        topic, partition, offset, value = message.topic, message.partition, message.offset, message.value
        headers: list[tuple[str, bytes]] = [(name, content or b"") for name, content in message.headers or ()]
        append_ms = round((message.timestamp or 0) * 1000)
        read = self._r.intake.read(topic, partition, offset, append_ms, headers, value)
        key = (topic, partition, offset)
        arrival = self._r.gate.arrive((topic, partition), offset, _gate_id(read, key), event)
        if arrival is Arrival.NEW:
            if self._r.gate.inflight - self._checked_inflight >= HOUSEKEEPING_WORKS:
                self._keep_house(self._clock())
            if isinstance(read, Poison):
                self._poison(key, read, value or b"", message.key, dict(headers))
            else:
                self._accept(key, read, value or b"", headers)
        for handle in self._r.gate.take_acks():
            handle.ack()
        # The work keeps what it needs; a record that waits behind a slow head should not keep its bytes.
        message.value = event.value = None
        self._kick()

    def _poison(self, key: WorkKey, poison: Poison, original: bytes, record_key: bytes | None, headers: Any) -> None:
        work: Work | None = None
        if poison.request_id is not None:
            request = InferenceRequest(
                request_id=poison.request_id,
                tenant=poison.tenant or "default",
                task="text_generation",
                created_at=poison.origin.append_time_ms,
            )
            work = self._hold(key, request, poison.origin, "medium", None, poison.attempt, None)
            # It is nobody's to cancel; and another record with this id may be valid work.
            work.keeping = True

        def written() -> None:
            if work is None:
                self._r.outcomes.commit(*key)
                self._kick()
            else:
                self._r.outcomes.settle(work, "dead_lettered", error=poison.reason)

        self._r.outcomes.letter(
            poison.reason,
            original=original,
            headers=headers,
            key=record_key,
            request_id=poison.request_id,
            tenant=poison.tenant,
            origin=poison.origin,
            attempts=poison.attempt,
            done=written,
        )

    def _accept(self, key: WorkKey, taken: Taken, original: bytes, headers: list[tuple[str, bytes]]) -> None:
        if taken.belongs_on is not None:
            self._send_home(key, taken, taken.belongs_on, original, headers)
            return
        request = taken.request
        work = self._hold(key, request, taken.origin, taken.klass, taken.line, taken.attempt, taken.deadline_ms)
        self._subjects[(request.tenant, request.request_id)] = work
        outcomes = self._r.outcomes
        if taken.error is not None:
            outcomes.settle(work, "failed", error=taken.error)
            return
        cancel = self._r.control.cancelled(request.tenant, request.request_id)
        if cancel is not None:
            self._end_unrun(work, Cancelled(cancel.reason or "cancelled before it ran"))
            return
        now_wall = now_ms()
        if taken.deadline_ms is not None and now_wall >= taken.deadline_ms:
            self._end_unrun(work, Expired("its deadline passed before it was taken"))
            return
        try:
            work.model = self._r.lanes.resolve(request.task, request.model)
            work.lane = work.model.id
            self._r.lanes.check_fits(work.lane, request.requirements)
        except PenstockError as error:
            outcomes.settle(work, "failed", error=error)
            return
        deaths = self._r.journal.deaths(key, request.request_id)
        self._originals[key] = (original, dict(headers))
        if deaths >= request.max_attempts:
            self.dead_letter(work, EngineFailed(f"{deaths} times a worker died while it ran"))
            return
        work.alone = deaths >= 2
        self._enqueue(work, now_wall)

    def _end_unrun(self, work: Work, error: Cancelled | Expired) -> None:
        """End what did not run here; a turn only if it has no answer from a worker that died before it could say so."""
        if work.line is None:
            self._r.outcomes.settle(work, error.code, error=error)
        else:
            self._r.runs.end_unless_answered(work, error)

    def _enqueue(self, work: Work, now_wall: int) -> None:
        request = work.request
        changed = self._r.control.priority(request.tenant, request.request_id)
        priority = request.priority if changed is None else changed
        deadline = None if work.deadline_ms is None else self._clock() + (work.deadline_ms - now_wall) / 1000
        self._r.scheduler.add(
            Item(
                key=work.key,
                request_id=request.request_id,
                tenant=request.tenant,
                klass=work.klass if changed is None else priority_class(priority),
                priority=priority,
                lane=work.lane,
                line=work.line,
                enqueued_at=work.arrived_at,
                deadline=deadline,
                work=work,
            )
        )
        work.position = self._r.scheduler.up_to(work.klass if changed is None else priority_class(priority)) - 1
        self._r.outcomes.status(work, "queued")

    def _hold(
        self,
        key: WorkKey,
        request: InferenceRequest,
        origin: Any,
        klass: str,
        line: str | None,
        attempt: int,
        deadline_ms: int | None,
    ) -> Work:
        work = Work(
            key=key,
            request=request,
            origin=origin,
            klass=klass,
            lane="",
            line=line,
            deadline_ms=deadline_ms,
            arrived_at=self._clock(),
            attempt=attempt,
            epoch=self._generation,
        )
        self._works[key] = work
        return work

    def _send_home(
        self, key: WorkKey, taken: Taken, partition: int, original: bytes, headers: list[tuple[str, bytes]]
    ) -> None:
        """Put a conversation's record on the partition of its line, with its id and origin; then it is done here."""
        try:
            moved_value = self._r.codec.encode(taken.request)
        except BadAvro as error:
            self._poison(
                key,
                Poison(reason=error, request_id=None, tenant=None, origin=taken.origin, attempt=taken.attempt),
                original,
                None,
                dict(headers),
            )
            return
        name, value = origin_header(taken.origin)
        kept = [(header, content) for header, content in headers if header != name]

        def moved() -> None:
            self._r.outcomes.commit(*key)
            self._kick()

        self._r.publisher.republish(
            key[0],
            moved_value,
            key=(taken.line or "").encode(),
            headers=[*kept, (name, value)],
            partition=partition,
            done=moved,
        )

    # -- giving out

    def _kick(self) -> None:
        if not self._dispatch_due:
            self._dispatch_due = True
            asyncio.get_running_loop().call_soon(self._dispatch_or_break)

    def kick(self) -> None:
        """Something changed (room on a lane, a line let go): look for what can start, soon."""
        self._kick()

    def _dispatch_or_break(self) -> None:
        self._dispatch_due = False
        try:
            self._dispatch()
        except Exception:  # a fault of ours: go on half alive and every request waits for ever
            logger.exception("worker.dispatch_failed")
            self._break()

    def _break(self) -> None:
        self._taking, self._broken = False, True
        self._on_broken()

    def _dispatch(self) -> None:
        now = self._clock()
        scheduler = self._r.scheduler
        if self._taking:
            for _ in range(256):  # then let the loop breathe
                item = scheduler.next(now, self._can_start) if len(scheduler) else None
                if item is None:
                    break
                self._start(item.work)
            else:
                self._kick()
        if now - self._housekept_at >= HOUSEKEEPING_S:
            self._keep_house(now)

    def _start(self, work: Work) -> None:
        self._r.journal.started(work.key, work.request.request_id)
        if not self._r.lanes[work.lane].inline:
            self._r.journal.flush()  # an engine that runs elsewhere can take the worker with it
        self._r.runs.start(work, self._generation)

    def _keep_house(self, now: float) -> None:
        """What need not follow every single message: the journal's lines, and which partitions should pause."""
        self._housekept_at = now
        self._checked_inflight = self._r.gate.inflight
        self._r.journal.flush()
        if self._taking and not self._held:
            self._pause(self._r.gate.pauses())

    def _can_start(self, item: Item) -> Decision:
        work: Work = item.work
        alone = self._alone
        if alone is not None and work is not alone:  # it runs, or waits until all else has ended
            return Decision.WAIT if alone.started_at is None else Decision.BLOCK_LANE
        decision, waits_for = self._r.lanes.decide(item.lane)
        if waits_for is not None:
            self._r.outcomes.status(work, waits_for)
        if work.alone and decision is Decision.GRANTED:
            self._alone = work
            return Decision.WAIT if self._r.runs.active else decision
        return decision

    # -- endings

    def on_settled(self, work: Work) -> None:
        """The outcome is durable and the gate has been told."""
        self._let_go(work)
        self._r.journal.finished(work.key, work.request.request_id)
        self._kick()

    def dead_letter(self, work: Work, error: PenstockError) -> None:
        original, headers = self._originals.get(work.key, (b"", {}))
        self._r.outcomes.dead_letter(work, error, original, headers)

    def fail_lane(self, model: str, error: PenstockError) -> None:
        """A model that can never be loaded fails what waits for it, at once and by name."""
        for work in [w for w in self._works.values() if w.lane == model and w.stage is Stage.QUEUED]:
            self._r.scheduler.remove(work.key)
            self._r.outcomes.settle(work, "failed", error=error)

    def _let_go(self, work: Work) -> None:
        if self._works.get(work.key) is work:
            del self._works[work.key]
        subject = (work.request.tenant, work.request.request_id)
        if self._subjects.get(subject) is work:
            del self._subjects[subject]
        self._originals.pop(work.key, None)
        if self._alone is work:
            self._alone = None
        if work.line is not None and work.started_at is not None:
            self._r.scheduler.release_line(work.line)

    # -- control

    def on_commands(self, commands: list[ControlCommand]) -> None:
        """Commands from the control topic, in log order."""
        now = now_ms()
        for command in commands:
            if not self._r.control.apply(command, now):
                continue
            work = self._subjects.get((command.tenant, command.request_id))
            if command.kind == "cancel" and work is not None and work.live and not work.keeping:
                self._cancel(work, Cancelled(command.reason or "cancelled by its caller"))
            elif command.kind == "reprioritize" and work is not None and command.priority is not None:
                if work.stage is Stage.QUEUED:
                    klass = priority_class(command.priority)
                    self._r.scheduler.reprioritize(work.key, klass=klass, priority=command.priority)
            elif command.kind == "erase":
                self._on_erase(command)
        self._kick()

    def _cancel(self, work: Work, error: Cancelled) -> None:
        if work.stage is Stage.QUEUED:
            self._r.scheduler.remove(work.key)
            self._end_unrun(work, error)
        else:
            self._r.runs.cancel(work, error)

    def on_chunk_refused(self, work: Work, error: PenstockError) -> None:
        """A piece of the stream cannot be published: the whole could not either."""
        self._r.runs.cancel(work, error)

    # -- assignments

    def on_assigned(self, assignment: Assignment) -> None:
        """A new generation: let go of what is not ours any more, silently; begin anew when we were fenced."""
        self._generation = assignment.generation
        self._partitions = assignment.partitions
        self._held.clear()  # uncommitted, so they are delivered again
        gate = self._r.gate
        revocation = gate.assign(assignment.partitions, assignment.generation, fenced=assignment.fenced)
        gone = (
            list(self._works.values())
            if (restart_all := revocation.restart_all)
            else [self._works[key] for key in revocation.dropped if key in self._works]
        )
        for work in gone:
            self._drop(work)
        for handle in gate.take_acks():
            handle.ack()
        if gone or restart_all:
            logger.info("worker.let_go works=%d restart_all=%s", len(gone), restart_all)
        for command in self._r.control.erasures():
            self._on_erase(command)
        self._kick()

    def _drop(self, work: Work) -> None:
        if work.stage is Stage.QUEUED:
            self._r.scheduler.remove(work.key)
        elif work.live:
            self._r.runs.drop(work)
        work.stage = Stage.DROPPED
        if not self._broken:  # what ran when this worker broke may be what broke it
            self._r.journal.dropped(work.key, work.request.request_id)
        self._let_go(work)

    # -- time

    async def tick_forever(self) -> None:
        """The shared ticker: everything here that is due by time, for all works at once."""
        next_slow = next_positions = 0.0
        while True:
            await asyncio.sleep(TICK_S if self._works else SLOW_TICK_S / 2)
            now = self._clock()
            self._r.publisher.tick()
            self._r.outcomes.flush_statuses(now)
            self._r.runs.tick(now)
            self._keep_house(now)
            if now >= next_slow:
                next_slow = now + SLOW_TICK_S
                self._slow_tick(now)
            if now >= next_positions:
                next_positions = now + POSITIONS_S
                self._tell_positions()

    def _slow_tick(self, now: float) -> None:
        self._r.runs.check_timeouts(now, now_ms())
        for item in self._r.scheduler.expired(now):
            self._r.scheduler.remove(item.key)
            self._end_unrun(item.work, Expired("its deadline passed while it waited"))
        if self._held and self._taking:
            self._retry_held()
        self._kick()

    def _tell_positions(self) -> None:
        """Who is near the front and waits for long hears how the queue moves."""
        for position, item in enumerate(self._r.scheduler.front(POSITIONS_TOLD)):
            work: Work = item.work
            if work.position != position:
                work.position = position
                self._r.outcomes.moved_up(work)

    def _retry_held(self) -> None:
        while self._held:
            try:
                self._take(self._held[0])
            except RegistryUnavailable:
                return
            self._held.popleft()
        logger.info("intake.registry_back")

    # -- stopping and looking

    def stop_taking(self) -> list[Work]:
        """From here on nothing is taken or started. Returns what still runs; what is queued is handed back unsaid."""
        self._taking = False
        self._held.clear()
        self._pause(self._partitions)
        for work in [w for w in self._works.values() if w.stage is Stage.QUEUED]:
            self._drop(work)
        return self.unfinished()

    def unfinished(self) -> list[Work]:
        return list(self._works.values())

    def hand_back(self) -> None:
        """Let go of what still runs; it stays uncommitted and begins anew elsewhere."""
        for work in self.unfinished():
            if work.stage is not Stage.SETTLING:
                self._drop(work)

    @property
    def has_room(self) -> bool:
        """Whether intake would take more: the stall watchdog counts only then."""
        return self._taking and not self._held

    @property
    def broken(self) -> bool:
        """Whether it ended by a fault of its own, for which what it ran may be to blame."""
        return self._broken

    @property
    def registry_waits(self) -> bool:
        return bool(self._held)

    @property
    def running(self) -> int:
        return len(self._r.runs.active)


def _gate_id(read: Taken | Poison, key: WorkKey) -> str:
    """What names the work in the gate: the same request at a second offset is held back, except on its way home."""
    if isinstance(read, Poison):
        return f"poison {key}"
    if read.belongs_on is not None:
        return f"moved {key}"
    return f"{read.request.tenant}/{read.request.request_id}"
