"""The consumer group through Faust: agents over raw topics, assignments with their generation, pausing, commits.

Faust is used only where it is safe (docs/decisions, tests/integration/faust_contract): raw bytes in, agents that never
await work, acks in contiguous order by our gate, pausing on the aiokafka consumer inside Faust's consumer thread, and a
poll interval so long that a blocked loop never becomes a silent zombie.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import faust
from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata
from faust.sensors import Monitor
from faust.transport.drivers import aiokafka as aiokafka_driver

from penstock.producers.settings import KafkaSettings

logger = logging.getLogger(__name__)

IN_HAND = 8
START_RETRY_S = 1.0
TP = tuple[str, int]
IN_STREAMS: TP = ("(fetched)", -1)
Call = Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """How this member joins: ids, timings (seconds unless named otherwise) and where Faust may keep its folder."""

    group_id: str
    client_id: str
    data_dir: Path
    session_timeout_s: float = 10.0
    heartbeat_s: float = 2.0
    commit_interval_s: float = 0.3
    fetch_wait_ms: int = 100
    poll_records: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One generation of the group as this member sees it."""

    partitions: frozenset[TP]
    generation: int
    fenced: bool
    """True when this member was thrown out, or missed a generation: others may have worked on its partitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where the fetch of one partition stands."""

    position: int | None
    highwater: int | None
    paused: bool


class _QuietMonitor(Monitor):
    """Faust's monitor without its per-message statistics, which cost more than our own work per message."""

    logger = logging.getLogger("faust.monitor")  # mode would name it after this module

    def on_message_in(self, tp: Any, offset: int, message: Any) -> None:
        pass

    def on_stream_event_in(self, tp: Any, offset: int, stream: Any, event: Any) -> None:
        pass

    def on_stream_event_out(self, tp: Any, offset: int, stream: Any, event: Any, state: Any = None) -> None:
        pass

    def on_message_out(self, tp: Any, offset: int, message: Any) -> None:
        pass

    def track_tp_end_offset(self, tp: Any, offset: int) -> None:
        pass


def _credentials(security: Mapping[str, str]) -> Any:
    """librdkafka's security settings as Faust's credentials; None for plain connections."""
    protocol = security.get("security.protocol", "PLAINTEXT").upper()
    if protocol == "PLAINTEXT":
        return None
    context: ssl.SSLContext | None = None
    if protocol.endswith("SSL"):
        context = ssl.create_default_context(cafile=security.get("ssl.ca.location"))
        if "ssl.certificate.location" in security:
            context.load_cert_chain(
                security["ssl.certificate.location"],
                security.get("ssl.key.location"),
                security.get("ssl.key.password"),
            )
    if protocol == "SSL":
        return faust.SSLCredentials(context)  # pyright: ignore[reportArgumentType]
    return faust.SASLCredentials(
        username=security.get("sasl.username"),
        password=security.get("sasl.password"),
        mechanism=security.get("sasl.mechanism") or security.get("sasl.mechanisms") or "PLAIN",  # pyright: ignore[reportArgumentType]
        ssl_context=context,
    )


@types.coroutine
def _resume(started: Coroutine[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """Go on with a coroutine whose first step was taken by hand and that waits for something."""
    while True:
        try:
            answer = yield waits_for
        except BaseException as error:
            step: Callable[[], Any] = partial(started.throw, error)
        else:
            step = partial(started.send, answer)
        try:
            waits_for = step()
        except StopIteration as done:
            return done.value


@dataclass(slots=True)
class _Pauses:
    wanted: frozenset[TP] = frozenset()
    applied: frozenset[TP] = frozenset()
    kick: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    in_hand: int = 0
    """Messages that Faust put into its streams' queues and our agents have not seen yet."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)

    seen: int = 0

    def progress(self) -> Progress:
        """Messages that were fetched, as a partition of their own: they too may be stuck."""
        return Progress(position=self.seen, highwater=self.seen + max(0, self.in_hand), paused=False)

    def take(self) -> None:
        self.seen += 1
        self.in_hand -= 1
        if self.in_hand <= IN_HAND:
            self.taken.set()


class _EagerConsumer(aiokafka_driver.Consumer):
    """Faust's consumer, handing a message on without two tasks for it when nothing has to be waited for.

    Faust delivers each message with `wait_first(callback(message), suspend_flow.wait())`. The callback nearly always
    ends in its first step; then there was nothing to wait for. Half of Faust's cost per message goes with that.
    """

    pauses: _Pauses | None = None
    stall: Callable[[], bool] = staticmethod(lambda: False)

    async def _wait_next_records(self, timeout: float) -> Any:
        """Fetch on only when what was fetched is seen and the pauses decided on it hold.

        Faust would fill its queues (thousands) while the agents are still at the first messages, and a flood of low
        work would pass the cap by as many. So it passes it by about one batch.
        """
        if self.stall():
            await asyncio.Event().wait()
        pauses = self.pauses
        if pauses is not None:
            if pauses.in_hand > IN_HAND:
                pauses.taken.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(pauses.taken.wait(), 0.5)
            if not pauses.settled.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(pauses.settled.wait(), 0.5)
        return await super()._wait_next_records(timeout)

    async def wait_first(self, *coros: Any, timeout: Any = None) -> Any:
        if len(coros) != 2 or not asyncio.iscoroutine(coros[0]) or self.suspend_flow.is_set():
            return await super().wait_first(*coros, timeout=timeout)
        delivery, suspended = coros
        if self.pauses is not None:
            self.pauses.in_hand += 1
        try:
            waits_for = delivery.send(None)
        except StopIteration:
            suspended.close()
            return None
        return await super().wait_first(_await(_resume(delivery, waits_for)), suspended, timeout=timeout)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def make_faust_app(kafka: KafkaSettings, group: GroupSettings) -> Any:
    """The Faust app with the settings that the proofs found safe. The contract tests run on this very function."""
    group.data_dir.mkdir(parents=True, exist_ok=True)
    brokers = ";".join(f"kafka://{server.strip()}" for server in kafka.bootstrap_servers.split(","))
    app = faust.App(
        group.group_id,
        broker=brokers,
        broker_credentials=_credentials(kafka.security),
        broker_client_id=group.client_id,
        autodiscover=False,
        value_serializer="raw",
        key_serializer="raw",
        web_enabled=False,
        store="memory://",  # pyright: ignore[reportArgumentType]
        datadir=str(group.data_dir),
        Monitor=_QuietMonitor,  # pyright: ignore[reportArgumentType]
        topic_allow_declare=False,
        topic_disable_leader=True,
        # More than 0, or Faust falls back to round robin, which does not keep partition k of all topics together.
        table_standby_replicas=1,
        # With True a joining worker waits for all work in flight.
        stream_wait_empty=False,
        stream_buffer_maxsize=4096,
        broker_commit_interval=group.commit_interval_s,
        broker_session_timeout=group.session_timeout_s,
        broker_heartbeat_interval=group.heartbeat_s,
        broker_max_poll_records=group.poll_records,
        broker_max_poll_interval=86_400.0,
        consumer_auto_offset_reset="earliest",
        # The worker has a watchdog of its own; Faust's only logs.
        stream_processing_timeout=86_400.0,
        broker_commit_livelock_soft_timeout=86_400.0,
        # The stream's C loop may take what is in its queue without a round through the event loop.
        cython_optimizations=True,
    )
    app.transport.Consumer = _EagerConsumer  # pyright: ignore[reportAttributeAccessIssue]
    return app


class Membership:
    """One member of the worker group. All methods belong to the event loop that called `start`.

    `on_event` gets each Faust event (its `.message` has topic, partition, offset, timestamp, headers, key and value;
    `.ack()` marks it for commit). `on_assigned` is called once per generation, before any of that generation's events.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        group: GroupSettings,
        topics: Sequence[str],
        *,
        on_event: Callable[[Any], None],
        on_assigned: Callable[[Assignment], None],
        stall: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stall = stall
        self.generation = -1
        self.partitions: frozenset[TP] = frozenset()
        self.rebalances = 0
        self._fetch_wait_ms = group.fetch_wait_ms
        self._topics = frozenset(topics)
        self._on_event = on_event
        self._on_assigned = on_assigned
        self._member_id: str | None = None
        self._ready = -1
        self._early: list[Any] = []
        self._pauses = _Pauses()
        self._pauses.settled.set()
        self._pauser: asyncio.Task[None] | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._app = make_faust_app(kafka, group)
        for topic in topics:
            self._app.agent(self._app.topic(topic, value_serializer="raw"), name=f"intake.{topic}")(self._agent)
        self._app.on_partitions_assigned.connect(self._assigned)

    async def start(self) -> None:
        """Join the group. Returns when Faust's services run, which is before the first assignment."""
        self._app.consumer.pauses, self._app.consumer.stall = self._pauses, self._stall
        self._pauser = asyncio.create_task(self._apply_pauses(), name="pauses")
        await self._app.start()

    async def stop(self) -> None:
        """Commit what is acked and leave the group."""
        for task in (self._pauser, self._beginning):
            if task is not None:
                task.cancel()
        await self._app.stop()

    @property
    def joined(self) -> bool:
        return self._ready >= 0 and self._ready == self.generation

    @property
    def crashed(self) -> bool:
        """Faust gave up: nothing will be taken or committed any more, so the process must end and be restarted."""
        consumer = self._app.consumer
        return bool(self._app.crashed or consumer.crashed or consumer._thread.crashed)

    def owns(self, topic: str, partition: int) -> bool:
        return (topic, partition) in self.partitions

    async def commit(self) -> None:
        """Commit now what has been acked in contiguous order."""
        await self._app.consumer.commit()

    def pause(self, wanted: frozenset[TP]) -> None:
        """Make exactly these partitions paused: soon, in the consumer's thread, and again after each rebalance."""
        if wanted != self._pauses.wanted:
            self._pauses.wanted = wanted
            self._pauses.settled.clear()
            self._pauses.kick.set()

    async def progress(self) -> dict[TP, Progress]:
        """Position and high watermark per assigned partition, and of what Faust holds between fetch and agent."""
        kafka = self._kafka()

        async def look() -> dict[TP, Progress]:
            found: dict[TP, Progress] = {}
            assignment = kafka._subscription.subscription.assignment
            for tp in kafka.assignment():
                state = assignment.state_value(tp)
                position = state.position if state is not None and state.has_valid_position else None
                found[(tp.topic, tp.partition)] = Progress(
                    position=position, highwater=kafka.highwater(tp), paused=bool(state and state.paused)
                )
            return found

        return {**await self._in_thread(look), IN_STREAMS: self._pauses.progress()}

    # -- Faust's side

    async def _agent(self, stream: Any) -> None:
        events: AsyncIterator[Any] = stream.noack().events()
        on_event = self._on_event
        pauses = self._pauses
        async for event in events:
            generation = event.message.generation_id
            if self._ready == generation:
                pauses.take()
                on_event(event)
            elif generation >= self.generation:
                # It can be faster than the signal of its own generation, and waits for the start offsets' commit. It is
                # not taken yet: so fetching stops meanwhile.
                self._early.append(event)

    async def _assigned(self, _app: Any, assigned: Any, **_: Any) -> None:
        # The generation that Faust stamps on this assignment's messages; the coordinator's own may have moved on since.
        generation, member_id = int(self._app.consumer_generation_id), await self._in_thread(self._identity)
        partitions = frozenset((tp.topic, tp.partition) for tp in assigned if tp.topic in self._topics)
        old = self.generation
        fenced = old >= 0 and (generation != old + 1 or member_id != self._member_id)
        self.generation, self._member_id, self.partitions = generation, member_id, partitions
        self.rebalances += 1
        logger.info(
            "group.assigned generation=%d old=%d fenced=%s partitions=%d", generation, old, fenced, len(partitions)
        )
        self._on_assigned(Assignment(partitions=partitions, generation=generation, fenced=fenced))
        self._pauses.applied = frozenset()  # aiokafka's pause flags die with the old assignment
        self._early = [event for event in self._early if event.message.generation_id == generation]
        self._pauses.in_hand = len(self._early)  # else Faust has emptied its queues
        self._pauses.kick.set()
        if not await self._begin(generation):
            self._beginning = asyncio.create_task(self._begin_at_last(generation), name="start offsets")

    async def _begin_at_last(self, generation: int) -> None:
        """Until it works or a newer assignment overtakes this one: a group must not depend on one answer."""
        while self.generation == generation:
            await asyncio.sleep(START_RETRY_S)
            if await self._begin(generation):
                return

    async def _begin(self, generation: int) -> bool:
        """Commit the start offsets, then take what has come meanwhile; False when the broker did not take them."""
        try:
            await self._in_thread(self._commit_start_offsets)
        except Exception as error:  # raised on, it would crash Faust
            logger.warning("group.start_offsets_failed error=%r: tried again", error)
            return False
        if self.generation != generation:
            return True  # a newer assignment overtook this one
        self._ready = generation
        early, self._early = self._early, []
        for event in early:
            if event.message.generation_id == generation:
                self._pauses.take()
                self._on_event(event)
        return True

    async def _identity(self) -> str:
        kafka = self._kafka()
        kafka._fetcher._fetch_max_wait_ms = self._fetch_wait_ms
        return str(kafka._coordinator.member_id)

    async def _commit_start_offsets(self) -> None:
        """Give every assigned partition a committed offset, so that the group never looks new again (invariant 3)."""
        kafka = self._kafka()
        mine = [tp for tp in kafka.assignment() if tp.topic in self._topics]
        committed = await kafka._coordinator.fetch_committed_offsets(mine) if mine else {}
        missing = [tp for tp in mine if tp not in committed or committed[tp].offset < 0]
        if missing:
            starts = await kafka.beginning_offsets(missing)
            await kafka.commit({tp: OffsetAndMetadata(offset, "") for tp, offset in starts.items()})
            logger.info("group.start_offsets committed=%d", len(missing))

    def _kafka(self) -> Any:
        """The aiokafka consumer inside Faust's consumer thread: touch it only from there."""
        return self._app.consumer._thread._consumer

    async def _in_thread(self, call: Call) -> Any:
        return await self._app.consumer._thread.call_thread(call)

    async def _apply_pauses(self) -> None:
        """Bring the aiokafka consumer's pause flags to the wanted set. Faust's own pausing loses fetched records."""
        pauses = self._pauses
        while True:
            await pauses.kick.wait()
            pauses.kick.clear()
            wanted = pauses.wanted & self.partitions
            to_pause, to_resume = wanted - pauses.applied, (pauses.applied - wanted) & self.partitions

            async def apply(pause: frozenset[TP] = to_pause, resume: frozenset[TP] = to_resume) -> None:
                kafka = self._kafka()
                assigned = kafka.assignment()
                kafka.pause(*(tp for tp in (TopicPartition(*p) for p in pause) if tp in assigned))
                kafka.resume(*(tp for tp in (TopicPartition(*p) for p in resume) if tp in assigned))

            if not to_pause and not to_resume:
                pauses.settled.set()
                continue
            try:
                await self._in_thread(apply)
                pauses.applied = wanted
                pauses.settled.set()
            except Exception as error:  # a rebalance in between: look again at the new assignment
                logger.info("group.pause_retry error=%r", error)
                await asyncio.sleep(0.1)
                pauses.kick.set()
