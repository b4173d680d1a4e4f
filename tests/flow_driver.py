"""A flow with a small world around it: time moves by hand, every answer is given by hand or at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.processors.core import effects as ask
from penstock.processors.core.flow import Flow
from penstock.processors.core.intake.arrivals import Poison, Taken
from penstock.processors.core.settings import FlowSettings
from penstock.processors.core.work.work import Body, Work
from penstock.processors.kafka.control import ControlBook
from penstock.schemas.abilities import Need
from penstock.schemas.choosing import Choice
from penstock.schemas.errors import ModelNotFound, PenstockError
from penstock.schemas.records import ControlCommand, InferenceRequest, Origin, Requirements

TOPICS = HIGH, MEDIUM, LOW, EMBEDDING = "high", "medium", "low", "embedding"
MOST_CHECKED = 24
"""Requests that a world may hold for its invariants to be checked after each event: more would take too long."""
PRIORITY = {"high": 2, "medium": 5, "low": 8}


def remembers_all() -> ControlBook:
    """The control topic as a worker remembers it, for ever."""
    return ControlBook(horizon_s=1e9, remembered=10_000)


@dataclass
class Finished:
    """What an engine gives; the flow passes it on untouched."""

    output: dict[str, Any] = field(default_factory=lambda: {"text": "done"})


class Models:
    """The catalog: every name that was given is a lane."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.unfit: PenstockError | None = None

    def resolve(self, task: str, model: str | None, need: Need | None = None) -> Choice:
        if self.unfit is not None:
            raise self.unfit
        if model is None:
            return Choice(self.names[0], "it is the first")
        if model not in self.names:
            raise ModelNotFound(f"the model {model} is not served here", param="model")
        return Choice(model)


class World:
    """`auto` answers what the shells answer at once; runs end only when a test says so."""

    def __init__(self, *lanes: str, **settings: Any) -> None:
        self.now = 100.0
        self.models, self.book = Models(*(lanes or ("m",))), remembers_all()
        self.died_of: dict[str, int] = {}
        """How many workers died while a request of this id ran."""
        self.flow = self.make_flow(FlowSettings(**settings), self.models, self.book)
        self.flow.registry.transitions = set()
        self.wall_ms = 1_000_000
        self.seen: list[ask.Effect] = []
        self.running: dict[str, Work] = {}
        self.run_ids: dict[str, str] = {}
        self.started: list[str] = []
        self.ended: list[tuple[str, str]] = []
        self.ended_works: list[Work] = []
        self.letters: list[str] = []
        self.chunks: list[ask.Chunk] = []
        self.asked: list[Any] = []
        self.loads: list[str] = []
        self.need: Callable[[Work], int] = lambda work: 0
        self.memory: Callable[[Work], int] = lambda work: 0
        self.hold_answers: set[type] = set()
        self.appends: str | None = None
        """Where what takes no turn appends its output."""
        self.offsets: dict[tuple[str, int], int] = {}
        self.bodies: dict[tuple[str, int, int], tuple[Taken, Body]] = {}
        self._committed: dict[tuple[str, int], int] = {}
        self.assigned(1)

    def make_flow(self, *args: Any) -> Flow:
        """A flow of models that take no memory; subclasses make others."""
        return Flow(*args, deaths=self.deaths)

    def deaths(self, key: Any, request_id: str) -> int:
        return self.died_of.get(request_id, 0)

    # -- in

    def submit(
        self,
        request_id: str,
        klass: str = MEDIUM,
        *,
        topic: str | None = None,
        model: str | None = None,
        tenant: str = "default",
        conversation: str | None = None,
        conversation_id: str | None = None,
        ttl_ms: int | None = 3_600_000,
        start_after_ms: int | None = None,
        cost: int = 1,
        stream: bool = False,
        size: int = 100,
        max_attempts: int = 0,
        error: PenstockError | None = None,
        belongs_on: int | None = None,
        pool: str | None = None,
        names_pool: str | None = None,
        execution_timeout_ms: int | None = None,
        payload: dict[str, Any] | None = None,
        task: str = "text_generation",
        requirements: Requirements | None = None,
        user_id: str | None = None,
        offset: int | None = None,
        origin: Origin | None = None,
        settle: bool = True,
    ) -> Work | None:
        """`offset`: of a record that is delivered again; None for a new one. `origin`: of a record that was moved."""
        tp = (topic or klass, 0)
        if offset is None:
            offset = self.offsets.get(tp, 0)
            self.offsets[tp] = offset + 1
        request = InferenceRequest(
            request_id=request_id,
            tenant=tenant,
            task=task,
            priority=PRIORITY[klass],
            model=model,
            conversation_id=conversation or conversation_id,
            pool=names_pool,
            stream=stream,
            created_at=self.wall_ms,
            max_attempts=max_attempts,
            execution_timeout_ms=execution_timeout_ms,
            requirements=requirements,
            user_id=user_id,
            start_after=start_after_ms,
            **cast("Any", {task: payload or {"prompt": request_id}}),
        )
        read = Taken(
            request=request,
            origin=origin or Origin(topic=tp[0], partition=0, offset=offset, append_time_ms=self.wall_ms),
            klass=klass,
            conversation=conversation,
            attempt=1,
            deadline_ms=None if ttl_ms is None else self.wall_ms + ttl_ms,
            error=error,
            belongs_on=belongs_on,
            cost=cost,
            size_bytes=size,
            pool=pool,
            names_deadline=ttl_ms is not None,
            start_after_ms=start_after_ms,
        )
        body = Body(request, b"value", (), None)
        self.bodies[(*tp, offset)] = (read, body)
        self.flow.commit.delivered(tp, offset, offset + 1, [offset])
        work = self.flow.arrived(tp, offset, read, body, self.now, self.wall_ms)
        if settle:
            self.settle()
        return work

    def poison(self, reason: PenstockError, request_id: str | None = None, value: bytes = b"bad") -> Work | None:
        tp = (MEDIUM, 0)
        offset = self.offsets.get(tp, 0)
        self.offsets[tp] = offset + 1
        origin = Origin(topic=MEDIUM, partition=0, offset=offset, append_time_ms=self.wall_ms)
        read = Poison(reason=reason, request_id=request_id, tenant=None, origin=origin, attempt=1)
        self.flow.commit.delivered(tp, offset, offset + 1, [offset])
        work = self.flow.arrived(tp, offset, read, Body(read.request, value, (), None), self.now, self.wall_ms)
        self.settle()
        return work

    def up(
        self, lane: str = "m", slots: int = 1, tokens: int | None = None, *, inline: bool = False, replica: int = 0
    ) -> None:
        self.flow.replicas.up(lane, replica, slots, tokens, self.now, inline=inline)
        self.settle()

    def die(self, lane: str = "m") -> None:
        """The lane's engine dies with what runs on it."""
        for request_id in [r for r, work in self.running.items() if work.lane == lane]:
            del self.running[request_id]
        self.flow.replicas.down(lane, 0, self.now)
        self.settle()

    def load_failed(self, error: PenstockError, lane: str = "m", replica: int = 0) -> None:
        self.flow.replicas.load_failed(lane, replica, error, self.now)
        self.settle()

    def assigned(self, generation: int, topics: tuple[str, ...] = TOPICS, *, fenced: bool = False) -> None:
        """Partition 0 of these topics from now on, with nothing committed."""
        self.flow.assigned({(topic, 0): (0, "") for topic in topics}, generation, fenced=fenced, now=self.now)
        self.settle()

    def answer_checked(self, work: Any, answer: Any) -> None:
        self.flow.durable.answer_checked(work.subject, answer, self.now, large=False)
        self.settle()

    def prepare(self, work: Work) -> None:
        """Answers a preparation that was held back, as one that needs nothing."""
        self.flow.attempts.prepared(work.subject, work.run.run_id, 0, None, self.now)
        self.settle()

    def refuse(self, work: Work, error: PenstockError, *, again: bool = True) -> None:
        self.flow.attempts.refused(work.subject, work.run.run_id, error, self.now, again=again)
        self.settle()

    def finish(self, request_id: str, *, large: bool = False, output_bytes: int = 0) -> None:
        work = self.running.pop(request_id)
        assert work.run is not None
        self.flow.attempts.finished(
            work.subject, work.run.run_id, Finished(), self.now, large=large, output_bytes=output_bytes
        )
        self.settle()

    def fail(self, request_id: str, error: PenstockError, *, again: bool = True) -> None:
        work = self.running.pop(request_id)
        assert work.run is not None
        self.flow.attempts.failed(work.subject, work.run.run_id, error, self.now, again=again)
        self.settle()

    def delta(self, request_id: str, text: str) -> None:
        work = self.running[request_id]
        assert work.run is not None
        self.flow.output.delta(work.subject, work.run.run_id, text, [1], self.now)
        self.settle()

    def cancel(self, request_id: str, tenant: str = "default", kind: str = "cancel") -> None:
        command = ControlCommand(kind=kind, request_id=request_id, tenant=tenant, created_at=self.wall_ms)
        self.flow.command(command, self.now, self.wall_ms)
        self.settle()

    def delete_conversation(self, conversation_id: str, tenant: str = "default") -> None:
        command = ControlCommand(
            kind="delete_conversation",
            request_id="",
            tenant=tenant,
            created_at=self.wall_ms,
            conversation_id=conversation_id,
        )
        self.flow.command(command, self.now, self.wall_ms)
        self.settle()

    def reprioritize(self, request_id: str, priority: int) -> None:
        command = ControlCommand(
            kind="reprioritize",
            request_id=request_id,
            tenant="default",
            priority=priority,
            created_at=self.wall_ms,
        )
        self.flow.command(command, self.now, self.wall_ms)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.wall_ms += round(seconds * 1000)
        self.flow.tick(self.now, self.wall_ms)
        self.flow.check_timeouts(self.now)
        self.settle()

    # -- out

    def settle(self) -> None:
        """Carry out what the flow asks until it asks nothing more."""
        while True:
            self.flow.step(self.now)
            effects = self.flow.take_effects()
            if not effects:
                if len(self.flow.works) <= MOST_CHECKED:
                    self.flow.check()
                    self.flow.commit.check()
                return
            for effect in effects:
                self.seen.append(effect)
                if type(effect) in self.hold_answers:
                    self.asked.append(effect)
                else:
                    self.answer(effect)

    def release(self, kind: type) -> None:
        """Answer what was held back, from now on at once."""
        self.hold_answers.discard(kind)
        asked, self.asked = (
            [e for e in self.asked if isinstance(e, kind)],
            [e for e in self.asked if not isinstance(e, kind)],
        )
        for effect in asked:
            self.answer(effect)
        self.settle()

    def answer(self, effect: Any) -> None:
        flow = self.flow
        match effect:
            case ask.Prepare(subject, run_id):
                work = flow.registry.of(subject)
                if work is not None:
                    need, memory = self.need(work), self.memory(work)
                    appends, to = self.appends is not None, self.appends
                    flow.attempts.prepared(
                        subject, run_id, need, None, self.now, to, memory_bytes=memory, appends=appends
                    )
            case ask.Begin(subject, run_id):
                flow.attempts.begun(subject, run_id, self.now, "topic")
            case ask.Start(subject, run_id):
                if (work := flow.registry.of(subject)) is not None:
                    self.run_ids[work.request_id] = run_id
                    self.running[work.request_id] = work
                    self.started.append(work.request_id)
            case ask.CancelRun(_, _, run_id):
                for request_id in list(self.running):
                    if self.run_ids[request_id] == run_id:
                        del self.running[request_id]
            case ask.StoreOutput(subject, finished):
                flow.durable.stored(subject, finished, None, self.now)
            case ask.CheckForAnswer(subject):
                flow.durable.answer_checked(subject, None, self.now)
            case ask.Terminal(subject, status):
                self.ended.append((subject.request_id, status))
                if (work := flow.registry.of(subject)) is not None:
                    self.ended_works.append(work)
                flow.published(subject, status)
            case ask.PublishDeadLetter(subject):
                self.letters.append(subject.request_id)
                flow.dead_lettered(subject, self.now)
            case ask.Republish(subject):
                flow.moved(subject)
            case ask.Fetch(tp, offsets):
                for offset in offsets:
                    read, body = self.bodies[(*tp, offset)]
                    flow.arrivals.fetched((*tp, offset), read, body, self.now)
            case ask.Load(model, _):
                self.loads.append(model)
            case ask.Chunk():
                self.chunks.append(effect)
            case _:
                pass

    def effects(self, kind: type) -> list[Any]:
        return [effect for effect in self.seen if isinstance(effect, kind)]

    def held(self, kind: type) -> list[Any]:
        """Those of which the answer is held back."""
        return [effect for effect in self.asked if isinstance(effect, kind)]

    def status_of(self, request_id: str) -> str | None:
        return dict(self.ended).get(request_id)

    def committed(self, topic: str = MEDIUM) -> int:
        """The offset that would be committed for partition 0 of the topic."""
        for tp, (offset, metadata) in self.flow.commit.commits().items():
            self.flow.commit.committed(tp, offset, metadata)
            self._committed[tp] = offset
        return self._committed.get((topic, 0), 0)


def ready(*, slots: int = 1, tokens: int | None = None, inline: bool = False, **settings: Any) -> World:
    """A world with an engine for its one model."""
    world = World(**settings)
    world.up(slots=slots, tokens=tokens, inline=inline)
    return world
