"""One life of a worker's process: the shell that carries events into its real flow and effects out. It decides nothing.

It does what `penstock.processors.worker`, `execution`, `committing` and `kafka/outcomes` do, without asyncio and Kafka.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.common.desired import DesiredRecord
from penstock.processors.core import effects as ask
from penstock.processors.core.commit.commit import DuplicateNotDelivered
from penstock.processors.core.commit.span import GapInDelivery
from penstock.processors.core.fleet.residents import Needs
from penstock.processors.core.flow import Flow
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Body, Run, Work, WorkKey
from penstock.processors.kafka.control import ControlBook
from penstock.processors.kafka.published_streams import StreamSoFar
from penstock.processors.models.catalog import ModelConfig
from penstock.schemas.errors import (
    BadAvro,
    EngineFailed,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PenstockError,
    StoreUnavailable,
    conversation_deleted,
)
from penstock.schemas.records import ControlCommand, ModelState, WorkerState
from penstock.schemas.tasks import TASKS
from simulation import events, livelock
from simulation.catalog import Catalog
from simulation.consumer import Batch, Consumer
from simulation.engines import Engine, Output, script_of
from simulation.inside import Inside, desired_models
from simulation.log import TP, Stored
from simulation.membership import Membership
from simulation.network import Network
from simulation.orders import Told as ToldByOrders
from simulation.orders import configured, follow
from simulation.talks import ToSumUp, Turns
from simulation.world import Actor

if TYPE_CHECKING:
    from simulation.cluster import Cluster, Host

POSITIONS_EACH = 16
"""Ticks between two tellings of positions."""
REGISTRY_WAIT_S = 0.1
SOON_S = 10.0
"""A deadline that is so near may be that of an output which the store never takes."""
REPORT_EACH_S = 0.3
PARTITIONS_EACH_S = 1.0
"""A real worker asks each ten seconds; faults happen for eight here."""


def _no_orders(news: Sequence[DesiredRecord]) -> None:
    """Nobody orders anything."""


class Life(Actor):
    """A worker's process from its start to its end."""

    def __init__(self, cluster: Cluster, host: Host, name: str) -> None:
        super().__init__()
        self.cluster, self.host, self.name = cluster, host, name
        self.world = cluster.world
        self.network = Network(cluster, self)
        self.commands = ControlBook(horizon_s=86_400, remembered=1_000)
        lanes = [lane for lane in cluster.plan.lanes if lane.name not in host.lacks]
        self._lanes = {lane.name: lane for lane in lanes}
        """Of each model that was ever served, how it is served now."""
        self.told = ToldByOrders(served=dict(self._lanes))
        self._catalog = Catalog(list(self._lanes))
        self._intake = cluster.new_intake()
        self.flow = Flow(
            replace(cluster.plan.settings, worker_id=name),
            self._catalog,
            self.commands,
            deaths=host.journal.deaths,
            earlier_attempts=host.journal.attempts,
            devices=host.devices.capacities,
        )
        self.inside = Inside(self.flow)
        self.inside.note_transitions(cluster.transitions)
        self._rounds = livelock.Turns(f"rounds of {name}", livelock.MOST_ROUNDS)
        self.inside.at_each_round(lambda what: self._rounds.turn(self.world.now, what))
        self.flow.orders.configure({lane.name: lane.spec for lane in lanes}, self.world.now)
        self.consumer = Consumer(self)
        self.membership = Membership(self)
        self.turns = Turns(self, cluster.talks)
        self.on_orders = desired_models(configured(lanes), self) if cluster.orders.used else _no_orders
        self.follows_orders = False
        self._registry_until = 0.0
        self._never_stored: set[Work] = set()
        self._told: dict[str, PublishedPrefix | None] = {}
        self._summing: dict[str, ToSumUp] = {}
        """By run: what other workers have told of its stream."""
        self.engines: dict[tuple[str, int], Engine] = {}
        self.stopping = False
        self._rng = self.world.stream(f"shell/{name}")
        self._queue: deque[ask.Effect] = deque()
        self._timers: set[str] = set()
        self._ticks = 0
        self._commands_read = 0
        self._carry: Mapping[type, Callable[[Any], None]] = {
            ask.Prepare: self._prepare,
            ask.Begin: self._begin,
            ask.Start: self._start,
            ask.CancelRun: lambda effect: self.engine(effect.lane, effect.replica).cancel(effect.run_id),
            ask.StoreOutput: self._keep,
            ask.CheckForAnswer: self._look_up,
            ask.Status: self._status,
            ask.Chunk: self._chunk,
            ask.Terminal: self._terminal,
            ask.PublishDeadLetter: self._letter,
            ask.Republish: self._republish,
            ask.Size: self._size,
            ask.Load: self._load,
            ask.Unload: self._unload,
            ask.Fetch: self._fetch,
            ask.RunEnded: lambda effect: host.journal.ended(effect.key, effect.request_id),
            ask.AttemptEnded: lambda effect: host.journal.attempt_ended(effect.key, effect.request_id, effect.attempt),
            ask.ForgetDeaths: lambda effect: host.journal.forget_deaths(effect.key, effect.request_id),
            ask.Erase: self._erase,
            ask.Retried: lambda effect: None,
        }
        cluster.watch(self)

    def start(self) -> None:
        """Read the control topic to its end, then join the group."""
        self.network.ask("control", "reads commands", lambda: list(self.cluster.commands), self._replayed)

    def _replayed(self, commands: list[ControlCommand]) -> None:
        self.on_commands(commands)
        self.cluster.follow_commands(self, len(commands))
        if self.cluster.orders.used:
            follow(self)
        else:
            self.joins()

    def joins(self) -> None:
        """It has read what it must know."""
        self.timer("observe", self._rng.uniform(0.0, 0.1), self._observe)
        if self.cluster.plan.reports:
            self.flow.peers.reported(self.cluster.reports)
            self._report()
        if self.cluster.plan.has("add_partitions"):
            self._ask_for_partitions()
        self.membership.join()

    def on_reports(self, reports: Sequence[WorkerState]) -> None:
        """What workers serve, this one included."""
        self.flow.peers.reported(reports)

    def _report(self) -> None:
        state = WorkerState(
            worker_id=self.name,
            state="stopping" if self.stopping else "running",
            started_at=0,
            updated_at=self.world.wall_ms,
            assigned=[f"{topic}/{partition}" for topic, partition in self.flow.commit.partitions()],
            models=[
                ModelState(model=name, state=self.flow.lane(name).state, tasks=list(TASKS)) for name in self.told.served
            ],
        )
        self.network.ask("worker", "reports", lambda: self.cluster.report(state), None)
        self.timer("report", REPORT_EACH_S, self._report)

    def _ask_for_partitions(self) -> None:
        """Partitions can be added while it runs: it asks now and then how many there are."""
        asked_at_ms = self.world.wall_ms

        def told(counts: dict[str, int]) -> None:
            self._intake.learn_partitions(counts, asked_at_ms)
            self.timer("partitions", PARTITIONS_EACH_S, self._ask_for_partitions)

        self.network.ask("metadata", "asks for partitions", lambda: dict(self.cluster.log.counts), told)

    # -- what operators want, as the product's own reading of orders tells it

    def hear_orders(self, news: Sequence[DesiredRecord]) -> None:
        """Orders written while it runs; before it has read those that stand they are among these."""
        if self.follows_orders:
            self.network.hear("desired", "an order", self.on_orders, news)

    def configure(self, models: Sequence[ModelConfig], removed: Set[str]) -> None:
        """These models are served from now on."""
        self.flow.peers.removed = self.told.removed = removed
        served = {config.id: self.cluster.plan.lane_of(config.source) for config in models}
        self._lanes.update(served)
        self.told.served = served
        self._catalog.names[:] = served
        self.world.note(f"{self.name} serves {[lane.source for lane in served.values()]}")
        self.flow.orders.configure({name: lane.spec for name, lane in served.items()}, self.world.now)

    def desire(self, model: str, loaded: bool | None, pinned: bool | None, revision: int) -> None:
        """Whether an operator wants it loaded, and pinned."""
        self.world.note(f"  {self.name} is to have {model} loaded {loaded} pinned {pinned}")
        self.told.loaded[model] = loaded
        self.flow.orders.desire(model, loaded, pinned, revision)

    def preload(self, model: str) -> None:
        """Models are loaded here when somebody asks for them."""

    def pause(self, kind: str, name: str, paused: bool) -> None:
        """Nothing new starts of a model or of a class, or it does again."""
        self.world.note(f"  {self.name} {'pauses' if paused else 'resumes'} {kind} {name}")
        self.told.pause(kind, name, paused)
        self.flow.orders.pause(kind, name, paused)

    # -- turns of the shell

    def after_event(self) -> None:
        self._take_some()
        if self.gone:
            return
        self.flow.step(self.world.now)
        self._carry_out()
        held = self.flow.pauses()
        self.cluster.checks.held(self, held)
        self.cluster.checks.handled(self)
        self.consumer.hold(held)
        if self.consumer.inbox:
            self.timer("turn", 0.0005, lambda: None)
        if self.inside.works() or self.consumer.inbox or self.flow.next_due() is not None:
            self.timer("tick", self.cluster.plan.tick_s, self._tick)
        self.consumer.arm()

    def timer(self, name: str, delay_s: float, do: Callable[[], None]) -> None:
        """At most one of a name runs at a time."""
        if name not in self._timers:
            self._timers.add(name)
            self.world.at(delay_s, self, f"{self.name} {name}", self._timer_fires, name, do)

    def _timer_fires(self, name: str, do: Callable[[], None]) -> None:
        self._timers.discard(name)
        do()

    def _take_some(self) -> None:
        if not self.flow.taking or self.world.now < self._registry_until:
            return
        taken = 0
        while taken < self.cluster.plan.records_a_turn and (batch := self.consumer.first()) is not None:
            if not batch.announced and not self._announce(batch):
                return
            for record in batch.records[batch.at :]:
                if not self.cluster.readable(record.value):
                    self._registry_until = self.world.now + REGISTRY_WAIT_S
                    self.timer("registry", REGISTRY_WAIT_S, lambda: None)
                    return
                if not self._take(batch.tp, record):
                    return
                batch.at += 1
                taken += 1
                if taken >= self.cluster.plan.records_a_turn:
                    break
            if batch.at >= len(batch.records):
                self.consumer.done(batch)

    def _announce(self, batch: Batch) -> bool:
        """Tell the gate of a batch. Where the consumer has skipped one, the worker breaks off and is started again."""
        batch.announced = True
        if self._registry_until:  # it may have stood for longer than the commit that was due with it
            self.may_commit()
        try:
            self.flow.commit.delivered(batch.tp, batch.start, batch.end, [record.offset for record in batch.records])
        except GapInDelivery:
            if not self.consumer.skipped:
                raise
            self.cluster.kill_worker(self, "a gap in deliveries")
            return False
        return True

    def _take(self, tp: TP, record: Stored) -> bool:
        """Whether it was taken. Where a log was cut and has grown again, a duplicate may wait for what is gone; no
        delivery brings it, so the worker breaks off and is started again.
        """
        try:
            read = self._read(tp, record)
            body = _body(read, record)
            work = self.flow.arrived(tp, record.offset, read, body, self.world.now, self.world.wall_ms)
        except DuplicateNotDelivered:
            if not self.cluster.log.partitions[tp].cuts:
                raise
            self.cluster.kill_worker(self, "a duplicate of what is gone")
            return False
        if work is not None:
            self.cluster.checks.taken(self, work)
        return True

    def _read(self, tp: TP, record: Stored) -> Any:
        return self._intake.read(tp[0], tp[1], record.offset, record.append_ms, record.headers, record.value)

    def _carry_out(self) -> None:
        flow, queue = self.flow, self._queue
        queue.extend(flow.take_effects())
        while queue:
            effect = queue.popleft()
            self.cluster.checks.effect(self, effect)
            if self.world.keeps_trace:
                self.world.note(f"  {self.name} {_told(effect)}")
            self._carry[type(effect)](effect)
            queue.extend(flow.take_effects())
            if not queue:
                flow.step(self.world.now)
                queue.extend(flow.take_effects())

    def _tick(self) -> None:
        now = self.world.now
        self._ticks += 1
        self.flow.tick(now, self.world.wall_ms)
        self.flow.check_timeouts(now)
        self.cluster.checks.ticked(self, now)
        if self._ticks % POSITIONS_EACH == 0:
            self.flow.publish_positions(64)

    def may_commit(self) -> None:
        """Something was done: a commit may be due."""
        self.timer(
            "commit", self.cluster.plan.commit_s, lambda: self.membership.commit(self.flow.commit, self._committed)
        )

    def _committed(self, again: bool) -> None:
        if again:
            self.may_commit()

    # -- from Kafka

    def on_batch(self, batch: Batch) -> None:
        if self.flow.taking:
            self.consumer.put(batch)
            self.may_commit()

    def on_assigned(self, committed: Mapping[TP, tuple[int, str]], generation: int, fenced: bool) -> None:
        self.consumer.assigned(committed, generation)
        self.cluster.checks.assigned(self, committed)
        self.flow.assigned(committed, generation, fenced=fenced, now=self.world.now, wall_ms=self.world.wall_ms)
        self.cluster.checks.holds_only_its_own(self, fenced=fenced)
        self.may_commit()

    def on_commands(self, commands: list[ControlCommand]) -> None:
        for command in commands:
            self.cluster.checks.hears(self, command)
            self.flow.command(command, self.world.now, self.world.wall_ms)

    # -- effects: engines and conversations

    def _prepare(self, effect: ask.Prepare) -> None:
        work, run_id = self.inside.work_of(effect.subject), effect.run_id
        run = work.run
        if run is None:
            return
        self._told[effect.run_id] = effect.published
        if effect.may_resume_stream:
            self._claim(effect, work)
        else:
            self._read_first(work, run, run_id)

    def _read_first(self, work: Work, run: Run, run_id: str) -> None:
        if work.conversation is not None:
            self._read_turn(work, run, run_id)
        elif work.conversation_id is not None:
            self._read_to_sum_up(work, run, run_id)
        else:
            self._count(work, run_id, None)

    def _claim(self, effect: ask.Prepare, work: Work) -> None:
        """Publish a claim where something was told of its stream; what stands before it then stays as it is."""
        subject, run = effect.subject, work.run
        published = self.cluster.readers.events[(subject.tenant, subject.request_id)]
        event = events.claim(subject, self.name, self.world.wall_ms)

        def stands() -> PublishedPrefix | None:
            if not published:
                return None
            self.cluster.on_result(event)
            stream = StreamSoFar(subject)
            for one in published:
                stream.apply(one)
            return stream.published

        def found(told: PublishedPrefix | None) -> None:
            if run is None or work.run is not run:
                return
            self._told[effect.run_id] = told
            self._read_first(work, run, effect.run_id)

        label = f"claim {event.request_id} {event.epoch}.{event.attempt}"
        self.network.ask("result", label, stands, found)

    def _read_turn(self, work: Work, run: Run, run_id: str) -> None:
        def told(answer: str | None, mark: Any) -> None:
            if answer is not None:
                output = Output(answer)
                self.flow.attempts.answer_stands(work.subject, run_id, output, self.world.now, large=_large(work))
            else:
                self._count(work, run_id, mark)

        self.turns.read(work, run, told)

    def _read_to_sum_up(self, work: Work, run: Run, run_id: str) -> None:
        def told(found: ToSumUp | None) -> None:
            if found is None:
                self.refused(work, run_id, NotFound("the conversation holds nothing"), False)
            elif found.standing is not None:
                output = Output(found.standing)
                self.flow.attempts.answer_stands(work.subject, run_id, output, self.world.now, large=_large(work))
            else:
                self._summing[run_id] = found
                self._count(work, run_id, None)

        self.turns.to_sum_up(work, run, told)

    def _count(self, work: Work, run_id: str, mark: Any) -> None:
        engine = self.engine_of(work)
        if engine is not None and engine.alive:
            engine.prepare(work, run_id, mark)

    def prepared(self, work: Work, run_id: str, need: int, mark: Any, memory: int) -> None:
        told = self._summing.get(run_id)
        if told is not None:
            mark = told.mark
        self.flow.attempts.prepared(
            work.subject, run_id, need, "prepared", self.world.now, mark, memory_bytes=memory, appends=told is not None
        )

    def refused(self, work: Work, run_id: str, error: PenstockError, again: bool) -> None:
        self.cluster.truth.told_failures[work] += again and not isinstance(error, StoreUnavailable)
        self.flow.attempts.refused(work.subject, run_id, error, self.world.now, again=again)

    def _begin(self, effect: ask.Begin) -> None:
        work, run_id = self.inside.work_of(effect.subject), effect.run_id
        run = work.run
        if run is None:
            return
        if self.cluster.happens("begin_refused", self._rng, 0.1):
            self.refused(work, run_id, InternalError("the conversation cannot be written"), False)
            return

        def told(topic_id: str | None) -> None:
            if topic_id is not None:
                self.flow.attempts.begun(work.subject, run_id, self.world.now, topic_id)
            else:
                self.flow.attempts.log_moved(work.subject, run_id, self.world.now)

        self.turns.begin(work, run, told)

    def _start(self, effect: ask.Start) -> None:
        work = self.inside.work_of(effect.subject)
        run = work.run
        self.host.journal.started(work.first_key, work.request_id)
        if run is None or run.run_id != effect.run_id or work.stage is not Stage.RUNNING:
            return
        engine = self.engine(work.lane, run.replica)
        if self.cluster.happens("engine_gone", self._rng, 0.03):
            engine.die()
        if engine.alive:
            told = self._told.pop(run.run_id, None) or effect.published
            told = told if engine.goes_on(run.run_id) else None
            if told is not None:
                self.flow.output.goes_on_from(work.subject, run.run_id, told)
            engine.start(work, run.run_id, told)
        else:
            self.flow.attempts.not_started(work.subject, run.run_id, self.world.now)

    def delta(self, work: Work, run_id: str, text: str, tokens: list[int], pieces: list[str]) -> None:
        logprobs = [{"token": piece} for piece in pieces]
        self.flow.output.delta(work.subject, run_id, text, tokens, self.world.now, logprobs=logprobs)

    def finished(self, work: Work, run_id: str, output: Output) -> None:
        self.flow.attempts.finished(
            work.subject, run_id, output, self.world.now, large=output.large, output_bytes=output.size
        )

    def failed(self, work: Work, run_id: str, error: PenstockError, again: bool) -> None:
        self.cluster.truth.told_failures[work] += again
        self.flow.attempts.failed(work.subject, run_id, error, self.world.now, again=again)

    def garbage(self, work: Work, run_id: str) -> None:
        """A piece of the stream that cannot be published."""
        if work.run is not None and work.run.run_id == run_id and work.stream:
            self.flow.durable.chunk_refused(work.subject, self.world.now)

    def _keep(self, effect: ask.StoreOutput) -> None:
        work, output = self.inside.work_of(effect.subject), effect.finished

        def kept(text: str) -> None:
            if self.cluster.happens("store_failed", self._rng, 0.15):
                self._keep_failed(effect, InternalError("it cannot be kept"))
            else:
                told = output if text == output.text else Output(text)
                self.flow.durable.stored(work.subject, told, None, self.world.now, another=told is not output)

        def append() -> None:
            if effect.to is not None and work.conversation is None:
                self.turns.add_summary(work, output.text, effect.to, kept, partial(self._keep_failed, effect))
            elif effect.to is not None:
                self.turns.finish(work, output.text, kept, lambda: self._keep_failed(effect, conversation_deleted()))
            else:
                kept(output.text)

        if output.large or effect.to is None:
            self._store(work, effect, append)
        else:
            append()

    def _keep_failed(self, effect: ask.StoreOutput, error: PenstockError) -> None:
        if effect.to is None:
            self.cluster.truth.awaiting_store.add(self.inside.work_of(effect.subject))
        self.flow.durable.store_failed(effect, error, self.world.now)

    def _store(self, work: Work, effect: ask.StoreOutput, kept: Callable[[], None]) -> None:
        """A store that hangs answers when it is back; one that fails says so, and is asked again.

        Some outputs with a deadline that is near it never takes any more: a folder of theirs is read-only, say.
        """
        store = self.cluster.store
        soon = work.deadline is not None and work.deadline < self.world.now + SOON_S

        def answered(_: object) -> None:
            if self.world.now >= store.away_until and work not in self._never_stored:
                kept()
            elif store.hangs and work not in self._never_stored:
                self.world.on(store.away_until, self, f"{self.name} hears of the store", answered, None)
            else:
                if work.deadline is not None:  # it may expire before the store takes it
                    self.cluster.truth.awaiting_store.add(work)
                if soon and self._rng.random() < 0.5:
                    self._never_stored.add(work)
                in_memory = self._rng.choice([0, effect.finished.size])
                away = StoreUnavailable("the store is away")
                self.flow.awaiting_store.not_stored(effect, away, self.world.now, output_bytes=in_memory)

        self.network.ask("artifacts", f"keeps {work.request_id}", lambda: work.request_id, answered)

    def _look_up(self, effect: ask.CheckForAnswer) -> None:
        work = self.inside.work_of(effect.subject)

        def told(answer: str | None) -> None:
            output = None if answer is None else Output(answer)
            self.flow.durable.answer_checked(
                work.subject, output, self.world.now, large=answer is not None and _large(work)
            )

        self.turns.answer(work, told)

    # -- effects: lanes

    def engine(self, model: str, number: int) -> Engine:
        """The process of a replica, alive or not."""
        known = self.engines.get((model, number))
        if known is None:
            known = self.engines[(model, number)] = Engine(self, self._lanes[model], number)
        return known

    def engine_of(self, work: Work) -> Engine | None:
        """The process of the replica that the work's run belongs to."""
        return None if work.run is None else self.engine(work.lane, work.run.replica)

    def replica_up(self, engine: Engine) -> None:
        spec = engine.spec
        self.told.loading.discard((spec.name, engine.replica))
        if engine.alive:
            self.flow.replicas.up(
                spec.name,
                engine.replica,
                spec.slots,
                spec.tokens,
                self.world.now,
                inline=spec.inline,
                measured_bytes=engine.used_bytes or None,
            )

    def replica_down(self, engine: Engine) -> None:
        self.cluster.checks.replica_goes_down(self, engine)
        self.told.loading.discard((engine.spec.name, engine.replica))
        self.told.failed_at[engine.spec.name] = self.world.now
        self.flow.replicas.down(engine.spec.name, engine.replica, self.world.now)

    def replica_busy(self, engine: Engine, seconds: float) -> None:
        key = (engine.spec.name, engine.replica)
        self.told.busy_until[key] = max(self.told.busy_until.get(key, 0.0), self.world.now + seconds)
        self.flow.replicas.busy(engine.spec.name, engine.replica, seconds, self.world.now)

    def replica_limits(self, engine: Engine, slots: int) -> None:
        self.flow.replicas.limits(engine.spec.name, engine.replica, slots, self.world.now)

    def turned_away(self, work: Work, run_id: str) -> None:
        self.flow.attempts.turned_away(work.subject, run_id, Overloaded("the server is full"), self.world.now)

    def out_of_memory(self, engine: Engine) -> None:
        self.flow.measurements.out_of_memory(engine.spec.name, engine.replica, self.world.now)

    def replica_gone(self, engine: Engine) -> None:
        self.told.loading.discard((engine.spec.name, engine.replica))
        self.flow.replicas.gone(engine.spec.name, engine.replica, self.world.now)

    def load_failed(self, engine: Engine, error: PenstockError) -> None:
        self.told.loading.discard((engine.spec.name, engine.replica))
        self.told.failed_at[engine.spec.name] = self.world.now
        self.flow.replicas.load_failed(engine.spec.name, engine.replica, error, self.world.now)

    def unload(self, engine: Engine) -> None:
        """A replica is taken away from outside."""
        if engine.alive:
            engine.end()
            self.replica_gone(engine)

    def _size(self, effect: ask.Size) -> None:
        spec = self._lanes[effect.model]
        needs = Needs(load_bytes=max(1, round(spec.load_bytes * spec.lie)), run_bytes=spec.run_bytes)
        failed = self.cluster.happens("size_failure", self._rng, 0.3)

        self.told.sizing.add(effect.model)

        def told() -> None:
            self.told.sizing.discard(effect.model)
            if failed:
                self.told.failed_at[effect.model] = self.world.now
                self.flow.replicas.size_failed(
                    effect.model, EngineFailed("its files could not be read"), self.world.now
                )
            else:
                self.flow.replicas.sized(effect.model, needs, self.world.now)

        self.world.at(self._rng.uniform(0.0, 0.1), self, f"{self.name} sizes {effect.model}", told)

    def _load(self, effect: ask.Load) -> None:
        engine = self.engine(effect.model, effect.replica)
        engine.spec = self._lanes[effect.model]
        self.told.loading.add((effect.model, effect.replica))
        engine.load(effect.device)

    def _unload(self, effect: ask.Unload) -> None:
        """The process takes a moment to end; its memory is back only then."""
        engine = self.engine(effect.model, effect.replica)
        self.cluster.checks.unloads(self, effect)
        self.told.loading.add((effect.model, effect.replica))
        engine.end_softly(self._rng.uniform(0.0, 0.05))

    def _observe(self) -> None:
        """What a probe measures."""
        observed = self.host.devices.observed(list(self.engines.values()))
        self.cluster.checks.observed(self, observed)
        measured = {
            key: {engine.device: engine.used_bytes}
            for key, engine in self.engines.items()
            if engine.alive and engine.device
        }
        self.flow.measurements.observed(observed, self.world.now, measured)
        self.cluster.checks.measured(self, measured)
        self.timer("observe", self.cluster.plan.observe_s, self._observe)

    # -- effects: what is published

    def _status(self, effect: ask.Status) -> None:
        event = events.status(effect, self.name, self.world.wall_ms)
        self.network.ask(
            "status", f"status {event.request_id} {event.status}", lambda: self.cluster.on_status(event), None
        )

    def _chunk(self, effect: ask.Chunk) -> None:
        event = events.chunk(effect, self.name, self.world.wall_ms)
        label = f"chunk {event.request_id} {event.epoch}.{event.attempt} {event.text_offset}"
        self.network.ask("result", label, lambda: self.cluster.on_result(event), None)

    def _terminal(self, effect: ask.Terminal) -> None:
        work = self.inside.work_of(effect.subject)
        event = events.terminal(effect, self.name, self.world.wall_ms)
        label = f"terminal {event.request_id} {event.epoch}.{event.attempt} {event.status}"

        def acknowledged(_: object) -> None:
            self.flow.published(work.subject, event.status or "")
            self.may_commit()

        self.network.ask("result", label, lambda: self.cluster.on_result(event), acknowledged)

    def _letter(self, effect: ask.PublishDeadLetter) -> None:
        work = self.inside.work_of(effect.subject)
        letter = events.letter(effect, self.name, self.world.wall_ms)

        def acknowledged(_: object) -> None:
            self.flow.dead_lettered(work.subject, self.world.now)
            self.may_commit()

        label = f"letter {work.first_place.topic}/{work.first_place.partition}/{work.first_place.offset}"
        self.network.ask("dlq", label, lambda: self.cluster.on_letter(letter), acknowledged)

    def _republish(self, effect: ask.Republish) -> None:
        work = self.inside.work_of(effect.subject)
        if self.cluster.happens("unmovable", self._rng, 0.3) or effect.pool is not None:
            # It cannot be written again, or a pool is not there: its caller hears which.
            poison = work.key[2] % 2 == 0
            error = BadAvro("it cannot be written again") if poison else InvalidRequest("no pool")
            self.flow.durable.cannot_move(work.subject, error, self.world.now)
            return
        key, value, headers = events.republished(effect, self.cluster.codec)
        tp = (work.key[0], effect.partition)

        def acknowledged(_: object) -> None:
            self.flow.moved(work.subject)
            self.may_commit()

        self.network.ask(
            "requests",
            f"moves {work.request_id}",
            lambda: self.cluster.append_request(tp, key, value, headers),
            acknowledged,
        )

    def _fetch(self, effect: ask.Fetch) -> None:
        """The refetcher: reads parked records again."""
        tp = effect.tp

        def read() -> list[Stored | None]:
            return [self.cluster.log.partitions[tp].at(offset) for offset in effect.offsets]

        def told(records: list[Stored | None]) -> None:
            for offset, record in zip(effect.offsets, records, strict=True):
                if record is None:
                    self._gone((*tp, offset))
                    continue
                if not self.cluster.readable(record.value):
                    again = ask.Fetch(tp, (offset,), effect.urgency)
                    self.world.at(1.0, self, f"{self.name} reads again after the registry", self._fetch, again)
                    continue
                known = self._read(tp, record)
                self.flow.arrivals.fetched((*tp, offset), known, _body(known, record), self.world.now)

        self.network.ask("fetch", f"reads again {tp} {effect.offsets}", read, told)

    def _gone(self, key: WorkKey) -> None:
        """A parked record has vanished from its topic. An answer to an earlier assignment's question says nothing."""
        held = [work for work in self.inside.works() if work.key == key and work.stage is Stage.FETCHING]
        self.flow.arrivals.gone(key, self.world.now)
        self.cluster.checks.vanished(held)

    def _erase(self, effect: ask.Erase) -> None:
        command = effect.command
        line = self.cluster.line_of(command)
        if line is None:
            self.commands.erasure_done(command)
        elif effect.held or self.cluster.truth.place_of(command) in self.flow.commit.partitions():
            self.network.ask(
                "erase",
                f"erases {command.request_id}",
                lambda: self.cluster.talks.erase(line, command.request_id),
                lambda _: self.commands.erasure_done(command),
            )

    # -- the end of the process

    def stop(self) -> None:
        """On a stop: take nothing more, finish or hand back, commit, leave."""
        if not self.stopping:
            self.stopping = True
            self.consumer.clear()
            self.flow.stop_taking()
            self.timer("drain", 0.02, lambda: self._drain(self.world.now + 1.0))

    def _drain(self, give_up: float) -> None:
        if self.flow.works and self.world.now < give_up:
            self.timer("drain", 0.02, lambda: self._drain(give_up))
            return
        self.flow.hand_back()
        self.timer("flush", 0.3, lambda: self.membership.leave(self.flow.commit, self._left))

    def _left(self) -> None:
        self.cluster.ended(self, orderly=True)

    def die(self) -> None:
        """kill -9: its engines end too."""
        self.gone = True
        self.network.flushes_until = self.world.now + self._rng.choice([0.0, 0.002, 0.02])
        for engine in self.engines.values():
            engine.end()


def _body(read: Any, record: Stored) -> Body:
    return Body(read.request, record.value or b"", record.headers, record.key)


def _told(effect: ask.Effect) -> str:
    subject = getattr(effect, "subject", None)
    what = getattr(effect, "status", None) or getattr(effect, "lane", None) or getattr(effect, "run_id", "")
    return f"{type(effect).__name__} {what} {'' if subject is None else (subject.request_id, *subject.key)}"


def _large(work: Work) -> bool:
    """Whether the answer that stands is large. Of a request whose record is gone nothing tells; then it is not."""
    lost = not work.lane  # its payload is unknown
    return not lost and work.body is not None and bool(script_of(work.request).get("large"))
