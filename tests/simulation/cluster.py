"""The cluster of one seed: log, coordinator, hosts with their workers, conversations, and what happens to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING
from zlib import crc32

from penstock.processors.core.intake.intake import Intake
from penstock.processors.core.intake.pools import Pools
from penstock.processors.core.work.states import IN_SCHEDULER, Transition
from penstock.processors.core.work.work import Work, WorkKey
from penstock.schemas.codec import Codec
from penstock.schemas.histories import extended
from penstock.schemas.records import (
    Attempt,
    AttemptHistory,
    ControlCommand,
    DeadLetter,
    ResultEvent,
    StatusEvent,
    WorkerState,
)
from penstock.schemas.topics import TopicNames, conversation_key
from simulation.coordinator import Coordinator
from simulation.devices import Devices
from simulation.gateways import Gateway
from simulation.invariants import Checks
from simulation.layouts import OwnTopics
from simulation.log import TP, Log
from simulation.operators import Store
from simulation.orders import Orders
from simulation.plan import Plan
from simulation.readers import Readers
from simulation.shared_topic import SharedTopic
from simulation.talks import Talks
from simulation.truth import Truth
from simulation.workers import Life
from simulation.world import World

if TYPE_CHECKING:
    from simulation.clients import Clients

NAMES = TopicNames()
CODEC = Codec()
TOPICS = (*NAMES.text_topics(), NAMES.request("embedding", 5))
URGENCY = {topic: urgency for urgency, topic in enumerate(TOPICS)}


class Journal:
    """A host's crash journal: how many of its workers died while a record ran, and what its failed attempts came to."""

    def __init__(self) -> None:
        self.running: dict[tuple[WorkKey, str], None] = {}
        self._deaths: Counter[tuple[WorkKey, str]] = Counter()
        self._attempts: dict[tuple[WorkKey, str], AttemptHistory] = {}

    def attempts(self, key: WorkKey, request_id: str) -> AttemptHistory | None:
        return self._attempts.get((key, request_id))

    def attempt_ended(self, key: WorkKey, request_id: str, attempt: Attempt) -> None:
        self._attempts[(key, request_id)] = extended(self._attempts.get((key, request_id)), [attempt])

    def deaths(self, key: WorkKey, request_id: str) -> int:
        return self._deaths[(key, request_id)]

    def started(self, key: WorkKey, request_id: str) -> None:
        self.running[(key, request_id)] = None

    def ended(self, key: WorkKey, request_id: str) -> None:
        self.running.pop((key, request_id), None)

    def forget_deaths(self, key: WorkKey, request_id: str) -> None:
        self._deaths.pop((key, request_id), None)
        self._attempts.pop((key, request_id), None)

    def next_life(self, *, orderly: bool) -> None:
        if not orderly:
            self._deaths.update(self.running.keys())
        self.running.clear()


class Host:
    """A machine: its journal outlives its worker's processes."""

    def __init__(self, name: str, plan: Plan) -> None:
        self.name = name
        self.journal = Journal()
        self.life: Life | None = None
        self.lives = 0
        self.devices = Devices(plan)
        self.lacks: frozenset[str] = frozenset()
        """Models of the plan that its next worker does not find in its file."""
        self.broken: frozenset[str] = frozenset()
        """Models that cannot be loaded here: their files are missing on this host."""


class Cluster:
    """Everything of one seed."""

    def __init__(self, plan: Plan, *, keep_trace: bool = False) -> None:
        self.plan = plan
        self.world = World(plan.seed, keep_trace=keep_trace)
        self.topics = TOPICS
        self.codec = CODEC
        self.log = Log(dict.fromkeys(TOPICS, plan.partitions))
        self.intake = self.new_intake()
        self.orders = Orders(self)
        self.store = Store()
        self.registry_away_until = 0.0
        layout = SharedTopic(plan.partitions) if plan.has("sharded") else OwnTopics()
        self.talks = Talks(layout, self._a_little_later)
        self.truth = Truth(self)
        self.readers = Readers(self)
        self.gateway = Gateway(self) if plan.has("delete_records") else None
        self.checks = Checks(self)
        self.coordinator = Coordinator(self)
        self.transitions: set[Transition] = set()
        self.commands: list[ControlCommand] = []
        self.reports: list[WorkerState] = []
        """What workers have reported, in log order."""
        self.clients: Clients | None = None
        self.broker_down_until = 0.0
        self.calm = False
        self.deaths_in_calm = 0
        """No more faults happen."""
        self.hosts = [Host(f"w{number}", plan) for number in range(plan.workers)]
        self._rng = self.world.stream("cluster")
        self._removals = self.world.stream("removals")
        self.log.group.on_commit = self.checks.committed
        self.world.after_step = self.checks.after_step

    def happens(self, fault: str, rng: Random, chance: float) -> bool:
        """Whether a fault of the plan happens now. It draws whether the plan has it or not."""
        drawn = rng.random() < chance
        if not drawn or self.calm or not self.plan.has(fault):
            return False
        self.world.fault(fault)
        return True

    def _a_little_later(self, do: Callable[[], None]) -> None:
        delay = self._removals.choice([0.0, self._removals.uniform(0.0, 0.05), self._removals.uniform(0.0, 1.0)])
        self.world.at(delay, None, "a deletion goes on", do)

    @staticmethod
    def urgency(topic: str) -> int:
        return URGENCY[topic]

    def new_intake(self) -> Intake:
        """Of a worker that starts now: it knows the partitions that there are."""
        return Intake(CODEC, NAMES, dict(self.log.counts), Pools())

    def readable(self, value: bytes | None) -> bool:
        """Whether a record can be read without the registry, which may be away: a part of all needs it."""
        return self.world.now >= self.registry_away_until or crc32(value or b"") % 3 != 0

    def add_partitions(self, more: int) -> None:
        """An operator adds so many to all topics; the group's members hear of it and join again."""
        for topic in self.topics:
            self.log.add_partitions(topic, self.log.counts[topic] + more)
        self.intake = self.new_intake()
        self.coordinator.partitions_added()

    # -- processes

    def start_worker(self, host: Host) -> None:
        if host.life is not None:
            return
        host.lives += 1
        host.life = Life(self, host, f"{host.name}.{host.lives}")
        self.world.note(f"{host.life.name} starts")
        host.life.start()

    def watch(self, life: Life) -> None:
        self.checks.watch(life)

    def lives(self) -> list[Life]:
        return [host.life for host in self.hosts if host.life is not None]

    def kill_worker(self, life: Life, why: str) -> None:
        if life.gone:
            return
        self.world.note(f"{life.name} is killed by {why}")
        self.deaths_in_calm += self.calm
        life.die()
        self.coordinator.unreachable(life)
        self.ended(life, orderly=False)

    def ended(self, life: Life, *, orderly: bool) -> None:
        """Its host starts the next one a little later."""
        host = life.host
        life.gone = True
        if not orderly:
            self.checks.journal_blames(life)
        host.journal.next_life(orderly=orderly)
        host.life = None
        for engine in life.engines.values():
            engine.end()
        self.world.at(self._rng.uniform(0.1, 0.8), None, f"{host.name} starts a worker", self.start_worker, host)

    def pause(self, life: Life, seconds: float) -> None:
        if life.gone or life.paused:
            return
        life.paused = True
        life.network.flushes_until = self.world.now + self._rng.choice([0.0, 0.01])
        self.coordinator.unreachable(life)
        self.world.at(seconds, None, f"{life.name} goes on", self._resume, life)

    def _resume(self, life: Life) -> None:
        if not life.gone:
            self.world.wake(life)
            self._heal(life)

    def cut(self, life: Life, seconds: float) -> None:
        if life.gone or life.network.cut:
            return
        life.network.cut = True
        life.network.flushes_until = 0.0
        self.coordinator.unreachable(life)
        self.world.at(seconds, None, f"{life.name} is connected again", self._reconnect, life)

    def _reconnect(self, life: Life) -> None:
        life.network.cut = False
        if not life.gone:
            self._heal(life)

    def _heal(self, life: Life) -> None:
        if life.network.reachable:
            life.network.heal()
            self.coordinator.reachable(life)

    # -- the log

    def append_request(self, tp: TP, key: bytes, value: bytes, headers: list[tuple[str, bytes]]) -> None:
        stored = self.log.append(tp, self.world.wall_ms, key, value, headers)
        self.truth.accepted(tp, stored)
        if self.gateway is not None:
            self.gateway.request(tp, stored)
        self.wake_consumers()

    def wake_consumers(self) -> None:
        """The log has grown."""
        for life in self.lives():
            if not life.paused:
                life.consumer.arm()

    def on_result(self, event: ResultEvent) -> None:
        self.readers.result(event)
        if self.gateway is not None:
            self.gateway.result(event)

    def on_status(self, event: StatusEvent) -> None:
        self.readers.status(event)
        if self.gateway is not None:
            self.gateway.status(event)
        if self.clients is not None and not self.calm:
            self.clients.hears(event)

    def on_letter(self, letter: DeadLetter) -> None:
        self.truth.dead_lettered(letter)

    def command(self, command: ControlCommand) -> None:
        """A record on the control topic: every worker hears of it."""
        self.commands.append(command)
        if self.gateway is not None:
            self.gateway.commanded(command)
        for life in self.lives():
            self._pass_on(life, command)

    def report(self, state: WorkerState) -> None:
        """A record on the topic of workers: every worker hears of it."""
        self.reports.append(state)
        for life in self.lives():
            life.network.hear("worker", f"a report of {state.worker_id}", life.on_reports, [state])

    def follow_commands(self, life: Life, known: int) -> None:
        """From here on; what came while it read is passed on first."""
        for command in self.commands[known:]:
            self._pass_on(life, command)

    def _pass_on(self, life: Life, command: ControlCommand) -> None:
        life.network.hear("control", f"{command.kind} {command.request_id}", life.on_commands, [command])

    @staticmethod
    def line_of(command: ControlCommand) -> str | None:
        if command.conversation_id is None:
            return None
        return conversation_key(command.tenant, command.conversation_id)

    def erased(self) -> set[tuple[str, str]]:
        """By conversation, the requests that their clients have erased. One that came later is another of that id."""
        found: set[tuple[str, str]] = set()
        for command in self.commands:
            line, records = self.line_of(command), self.truth.subjects.get((command.tenant, command.request_id), [])
            newest_ms = max((record.stored.append_ms for record in records), default=float("inf"))
            if command.kind == "erase" and line is not None and newest_ms <= command.created_at:
                found.add((line, command.request_id))
        return found

    # -- the whole

    @property
    def quiet(self) -> bool:
        """Nothing is left to do: every offset is committed, every worker holds nothing.

        A worker that stops keeps the offsets of what it handed back uncommitted until it has left the group.
        """
        if len(self.lives()) < len(self.hosts) or self.log.group.rebalancing:
            return False
        if any(life.stopping for life in self.lives()) or self._lost_ones_left:
            return False
        offsets = self.log.group.offsets
        if any(offsets.get(tp, (0, ""))[0] != partition.end for tp, partition in self.log.partitions.items()):
            return False
        return not any(life.inside.works() for life in self.lives())

    @property
    def _lost_ones_left(self) -> bool:
        return self.gateway is not None and bool(self.gateway.left())

    @property
    def at_rest(self) -> bool:
        """Nothing is left to do but what orders forbid: each request that is left is paused, or a turn behind one."""
        if len(self.lives()) < len(self.hosts) or self.log.group.rebalancing or self._lost_ones_left:
            return False
        for life in self.lives():
            if life.consumer.has_more or any(self.forbidden(life, work) is None for work in life.inside.works()):
                return False
        return True

    @staticmethod
    def forbidden(life: Life, work: Work) -> str | None:
        """The reason that a request must state while orders stand; None when no order forbids that it runs."""
        if work.stage not in IN_SCHEDULER or work.end_with is not None:
            return None
        if life.told.pauses(work.lane, work.klass):
            return "paused"
        before = (
            other
            for other in life.inside.works()
            if other.conversation == work.conversation
            and work.conversation is not None
            and other is not work
            # A turn may pass those of other classes; one that has begun and starts again holds the conversation.
            and (other.holds_conversation or (other.klass == work.klass and other.seq < work.seq))
        )
        return "conversation" if any(life.told.pauses(other.lane, other.klass) for other in before) else None
