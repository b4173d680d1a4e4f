"""The consumer group through Faust on librdkafka: batches to agents, assignments with their generation, commits.

Faust is used only where it is safe (docs/decisions, tests/integration/faust_contract): its app, its agents, which never
await work, and its part in a rebalance. Fetching, holding back and committing are ours (`poll_thread`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import faust
from faust.sensors import Monitor

from penstock.common import admin
from penstock.common.lost_brokers import LostBrokers
from penstock.common.read_rights import ReadRights
from penstock.common.settings import KafkaSettings
from penstock.common.tasks import end_all
from penstock.common.threads import in_daemon_thread
from penstock.processors.kafka import rdkafka_transport
from penstock.processors.kafka.batches import TP, Assignment, Batch, Committed, PartitionProgress
from penstock.processors.kafka.lost_logs import LostLogs, OnLostLog
from penstock.processors.kafka.poll_thread import PollThread
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

MAX_POLL_MS = 86_400_000
PARTITION_FETCH_BYTES = 131_072
QUEUED_KBYTES = 1_024
QUEUED_RECORDS = 1_000
HIGHWATER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """How this member joins: ids, timings (seconds unless named otherwise) and where Faust may keep its folder."""

    group_id: str
    client_id: str
    session_timeout_s: float = 10.0
    heartbeat_s: float = 2.0
    fetch_wait_ms: int = 100
    on_lost_log: OnLostLog = "beginning"


class _QuietMonitor(Monitor):
    """Faust's monitor without its per-message statistics, which cost more than our own work per message."""

    logger = logging.getLogger("faust.monitor")  # mode would name it after this module

    def _not_counted(self, *_: Any, **__: Any) -> Any:
        pass

    on_message_in = on_message_out = on_stream_event_in = on_stream_event_out = track_tp_end_offset = _not_counted


class _App(faust.App):
    """Faust's app without folders: nothing is stored there, and it would make them on the event loop."""

    def _create_directories(self) -> None:
        pass


def make_faust_app(group: GroupSettings) -> Any:
    """The Faust app with the settings that the proofs found safe. The contract tests run on this very function."""
    never = 86_400.0
    return _App(
        group.group_id,
        broker=f"{rdkafka_transport.SCHEME}://",  # the poll thread has the addresses
        broker_client_id=group.client_id,
        autodiscover=False,
        value_serializer="raw",
        key_serializer="raw",
        web_enabled=False,
        store="memory://",  # pyright: ignore[reportArgumentType]
        Monitor=_QuietMonitor,  # pyright: ignore[reportArgumentType]
        topic_allow_declare=False,
        topic_disable_leader=True,
        # With True a joining worker waits for all work in flight.
        stream_wait_empty=False,
        # Nothing is acked through Faust, so there is nothing to commit, and the worker has a watchdog of its own.
        broker_commit_interval=never,
        broker_commit_livelock_soft_timeout=never,
        stream_processing_timeout=never,
        # The stream's C loop may take what is in its queue without a round through the event loop.
        cython_optimizations=True,
    )


def consumer_config(kafka: KafkaSettings, group: GroupSettings) -> dict[str, Any]:
    """librdkafka's settings of a member.

    Little is fetched ahead: urgent records must not be behind much that was fetched before them.
    """
    return {
        **kafka.librdkafka(),
        "group.id": group.group_id,
        "client.id": group.client_id,
        # Keeps partition k of all topics with equal counts together.
        "partition.assignment.strategy": "range",
        "session.timeout.ms": round(group.session_timeout_s * 1000),
        "heartbeat.interval.ms": round(group.heartbeat_s * 1000),
        # A blocked loop must not become a silent zombie that never joins again.
        "max.poll.interval.ms": MAX_POLL_MS,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        # A position that the log does not hold is reported, and the poll thread says where it goes on.
        "auto.offset.reset": "error",
        # Says where the log ends, also where a transaction's marker has the last offset.
        "enable.partition.eof": True,
        "fetch.wait.max.ms": group.fetch_wait_ms,
        "fetch.error.backoff.ms": 50,
        "fetch.queue.backoff.ms": 10,
        "fetch.message.max.bytes": PARTITION_FETCH_BYTES,
        "fetch.max.bytes": max(1_000_000, kafka.max_record_bytes),
        "queued.min.messages": QUEUED_RECORDS,
        "queued.max.messages.kbytes": QUEUED_KBYTES,
    }


class Membership:
    """One member of the worker group. All methods belong to the event loop that called `start`.

    `on_batch` gets each `Batch` and calls its `taken` when it may have more. `on_assigned` is called once for each
    generation, before any of its batches. `on_revoking` says what else should be committed before the partitions go.
    `count_reset` is called in the consumer's thread, with the reason, for each partition that goes on at another offset
    than its position because its log does not hold that.
    """

    def __init__(
        self,
        kafka: KafkaSettings,
        group: GroupSettings,
        topics: Sequence[str],
        *,
        on_batch: Callable[[Batch], None],
        on_assigned: Callable[[Assignment], None],
        on_revoking: Callable[[], Mapping[TP, Committed]] = dict,
        urgency: Callable[[str], int] = lambda _: 0,
        stall: Callable[[], bool] = lambda: False,
        count_reset: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.generation = -1
        self.partitions: frozenset[TP] = frozenset()
        self.rebalances = 0
        self.on_joined: Callable[[], None] = lambda: None
        """Called at the end of each assignment."""
        self._kafka = kafka
        self.rights = ReadRights(kafka)
        self._group_id = group.group_id
        self._topics = topics
        self._config = consumer_config(kafka, group)
        self._urgency = urgency
        self._stall = stall
        self._lost_logs = LostLogs(group.on_lost_log, count_reset)
        self._on_batch = on_batch
        self._on_assigned = on_assigned
        self._on_revoking = on_revoking
        self._member_id: str | None = None
        self._ready = -1
        self._failed = False
        self._held: frozenset[TP] = frozenset()
        self._kept: dict[TP, deque[Batch]] = {}  # handed over before their partition was held
        self._positions: dict[TP, int] = {}
        self._highwaters: dict[TP, int] = {}
        self._highwaters_at = float("-inf")
        self._thread: PollThread | None = None
        self._starting: asyncio.Task[None] | None = None
        self._app = make_faust_app(group)
        for topic in topics:
            self._app.agent(self._app.topic(topic, value_serializer="raw"), name=f"intake.{topic}")(self._agent)

    def start(self) -> None:
        """Begin to join the group. `joined` says when that is done: Kafka may be away, or refuse this member."""
        loop = asyncio.get_running_loop()
        self._thread = PollThread(
            self._config,
            loop,
            self,
            urgency=self._urgency,
            lost_logs=self._lost_logs,
            lost_brokers=LostBrokers(self._kafka, self._topics[0]),
            rights=self.rights,
            stall=self._stall,
        )
        self._thread.hold(self._held)
        self._app.consumer.thread = self._thread
        # Faust's start returns after the first assignment, which may never come.
        self._starting = loop.create_task(self._app.start(), name="join")
        self._starting.add_done_callback(self._start_ended)

    async def stop(self) -> None:
        """Commit what was asked for and leave the group. A caller who gives up leaves no thread to be waited for."""
        if self._starting is not None:
            await end_all([self._starting])
        await self._app.stop()
        if self._thread is not None:
            await in_daemon_thread(self._thread.stop)

    @property
    def joined(self) -> bool:
        return self._ready >= 0 and self._ready == self.generation

    @property
    def waits_for(self) -> str:
        """Why it is not joined."""
        trouble = None if self._thread is None else self._thread.trouble
        return f"not a member of the group {self._group_id} yet" + (f": {trouble}" if trouble else "")

    @property
    def crashed(self) -> bool:
        """Nothing will be taken or committed any more, so the process must end and be restarted."""
        thread_failed = self._thread is not None and self._thread.failure is not None
        return bool(self._failed or thread_failed or self._app.crashed or self._app.consumer.crashed)

    def owns(self, topic: str, partition: int) -> bool:
        return (topic, partition) in self.partitions

    def commit(self, offsets: Mapping[TP, Committed]) -> asyncio.Future[dict[TP, bool]]:
        """Commit these offsets with their metadata; the result says of each whether the broker has it, or a newer one.

        An offset below what is known to be committed is refused. So is a partition that is not ours.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[dict[TP, bool]] = loop.create_future()

        def answered(results: dict[TP, bool]) -> None:
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(results))

        if self._thread is None:
            answer.set_result(dict.fromkeys(offsets, False))
        else:
            self._thread.commit(self.generation, offsets, answered)
        return answer

    def hold(self, tps: frozenset[TP]) -> None:
        """Hand over nothing of exactly these partitions, from now on and after rebalances too."""
        if tps == self._held:
            return
        released = self._held - tps
        self._held = tps
        if self._thread is not None:
            self._thread.hold(tps)
        for tp in released & self._kept.keys():
            kept = self._kept.pop(tp)
            while kept:
                if tp in self._held:  # on_batch held it again
                    self._kept[tp] = kept
                    break
                self._deliver(kept.popleft())

    async def progress(self) -> dict[TP, PartitionProgress]:
        """What was handed over of each assigned partition, and where its log ends (at most some seconds old)."""
        if refused := self.rights.topics:
            await asyncio.to_thread(self.rights.look)
        now = time.monotonic()
        if self._positions and now - self._highwaters_at >= HIGHWATER_S:
            self._highwaters_at = now
            try:
                self._highwaters = await asyncio.to_thread(
                    admin.end_offsets, self._kafka, list(self._positions), HIGHWATER_S
                )
            except PenstockError as error:
                logger.info("group.ends_unknown error=%s", error)
                self._highwaters = {}
        return {
            tp: PartitionProgress(
                position=position, highwater=self._highwaters.get(tp), paused=tp in self._held or tp[0] in refused
            )
            for tp, position in self._positions.items()
        }

    # -- from the poll thread, on the loop

    def handed_over(self, batch: Batch) -> None:
        self._app.consumer.handed_over(batch)

    async def revoked(self, *, lost: bool) -> Mapping[TP, Committed]:
        offsets = {} if lost else self._on_revoking()
        self._ready = -1  # until the next assignment: a member that never comes back must not look well
        self._positions = {}
        await self._app.consumer.revoked()
        return offsets

    async def assigned(
        self, generation: int, member_id: str, committed: Mapping[TP, Committed], *, begins_again: bool
    ) -> None:
        old = self.generation
        # Where a log has lost its end, offsets mean other records than those that were worked on.
        fenced = old >= 0 and (generation != old + 1 or member_id != self._member_id or begins_again)
        self._ready = -1
        self.generation, self._member_id, self.partitions = generation, member_id, frozenset(committed)
        self.rebalances += 1
        self._kept.clear()
        self._positions = {tp: offset for tp, (offset, _) in committed.items()}
        self._highwaters_at = float("-inf")
        logger.info(
            "group.assigned generation=%d old=%d fenced=%s partitions=%d", generation, old, fenced, len(committed)
        )
        try:
            self._on_assigned(
                Assignment(partitions=self.partitions, generation=generation, fenced=fenced, committed=committed)
            )
        except Exception:
            self._fail("on_assigned")
        await self._app.consumer.assigned(generation, committed)
        self._ready = generation
        self.on_joined()

    # -- from Faust

    async def _agent(self, stream: Any) -> None:
        events: AsyncIterator[Any] = stream.noack().events()
        async for event in events:
            batch: Batch = event.value
            event.value = event.message.value = None
            if batch.generation != self.generation:
                continue
            if batch.tp in self._held:
                batch.taken()  # others may pass it
                self._kept.setdefault(batch.tp, deque()).append(batch)
            else:
                self._deliver(batch)

    def _deliver(self, batch: Batch) -> None:
        self._positions[batch.tp] = batch.end
        try:
            self._on_batch(batch)
        except Exception:  # raised through, Faust would restart the agent and go on behind these records
            self._fail("on_batch")

    def _start_ended(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            logger.error("group.start_failed", exc_info=error)
            self._failed = True

    def _fail(self, where: str) -> None:
        logger.exception("group.callback_failed callback=%s", where)
        self._failed = True
