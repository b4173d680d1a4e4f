"""Following the compacted topics of orders and of reports: read to the end at the start, then on. Nothing on them ends
a worker.

A topic that is deleted and created again is another topic: the offsets of the former one mean nothing in it. It is
known by Kafka's topic id, and read from its beginning.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from penstock.common import admin
from penstock.common.arrivals import Arrivals
from penstock.common.background import BackgroundTasks
from penstock.common.clock import steady_ms
from penstock.common.desired import WITHDRAWN, DesiredRecord, read_record
from penstock.common.read_rights import ReadRights
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.threads import in_daemon_thread
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, DecodeError, InternalError, PenstockError, RegistryUnavailable
from penstock.schemas.records import WorkerState
from penstock.schemas.topics import is_of_gateway

logger = logging.getLogger(__name__)

T = TypeVar("T")

REGISTRY_RETRY_S = 1.0
LOOK_EACH_S = 5.0
"""How often it is looked whether the topic is still the same."""
FETCH_WAIT_MS = 500
POLL_S = 0.2
"""For so long the broker keeps a fetch that finds nothing. A record that comes ends the wait."""
REPLAY_S = 30.0
SLICE = 50
"""Records that run on the event loop in one go, so that a replay of thousands does not hold it up."""


class RecordFollower(Generic[T]):
    """Of a topic of one partition. `on_records` runs on the event loop, in log order; it must bear a record twice.

    The records come in small slices, and reading waits until the loop has done with one before it brings the next.
    `read` makes a record of a message, None of what says nothing. What it cannot decode (DecodeError) and what cannot
    be done is passed over with a log line that begins with `name`.

    Subclasses whose records are a state by key say so in `key_of` and `withdrawals`: what stood in the former topic
    alone is withdrawn once the new one was read to its end.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        topic: str,
        read: Callable[[RawMessage], T | None],
        loop: asyncio.AbstractEventLoop,
        on_records: Callable[[Sequence[T]], None],
        *,
        name: str,
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._topic_id: str | None = None
        self._is_there = True
        self._keys: set[str] = set()
        """Of the records that were handed over, for those that have one."""
        self._tasks = BackgroundTasks()
        self._read_message = read
        self._loop = loop
        self._on_records = on_records
        self._name = name
        self._stopping = threading.Event()
        self._reader = self._new_reader()

    def _new_reader(self) -> PartitionReader:
        return PartitionReader(
            self._settings, [self._topic], self._on_batch, fetch_wait_ms=FETCH_WAIT_MS, poll_s=POLL_S
        )

    def key_of(self, record: T) -> str | None:
        """The key of the state that the record holds; None for one that is no state."""
        return None

    def withdrawals(self, keys: Sequence[str]) -> list[T]:
        """What tombstones of these keys would be."""
        return []

    def topic_begins(self, topic_id: str | None) -> None:
        """A topic is read from its beginning: the first one, or another one of this name. On the event loop."""

    async def start(self, deadline_s: float) -> None:
        """Read to the end that the topic has now, so that an earlier order is known before work is admitted."""
        self._topic_id = await in_daemon_thread(admin.topic_id, self._settings, self._topic, deadline_s)
        self.topic_begins(self._topic_id)
        await self._replay(deadline_s)
        self._tasks.start(self._watch_topic(), f"watch {self._topic}")

    async def _replay(self, deadline_s: float) -> None:
        await in_daemon_thread(self._reader.start)
        await in_daemon_thread(self._reader.wait_until_caught_up, deadline_s)

    def catch_up(self, deadline_s: float) -> None:
        """Wait until `on_records` has had all records that the topic holds now. Blocks; not on the event loop.

        Raises BrokerUnavailable after `deadline_s`, also when reading has ended: the watchdog ends the worker then.
        """
        try:
            # Named here: a reader that is about to begin with a topic made again has no partitions yet.
            self._reader.wait_until_caught_up(deadline_s, partitions=[(self._topic, 0)])
        except InternalError as error:
            raise BrokerUnavailable(error.message) from error

    @property
    def rights(self) -> ReadRights:
        return self._reader.rights

    @property
    def alive(self) -> bool:
        return self._reader.failure is None

    async def stop(self) -> None:
        self._stopping.set()
        await self._tasks.cancel()
        await asyncio.to_thread(self._reader.stop)

    # -- a topic that is deleted and created again

    async def _watch_topic(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EACH_S)
            try:
                found = await in_daemon_thread(admin.topic_id, self._settings, self._topic)
                if found is not None and found != self._topic_id:
                    await self._follow_anew(found)
            except PenstockError as error:
                logger.info("%s.topic_unknown topic=%s error=%s", self._name, self._topic, error.code)
                continue
            if self._is_there and found is None:
                logger.error(
                    "%s.topic_gone topic=%s: its orders stand until it is there again", self._name, self._topic
                )
            self._is_there = found is not None

    async def _follow_anew(self, topic_id: str) -> None:
        """Read another topic of this name from its beginning. Raises PenstockError, and is then called again."""
        logger.warning(
            "%s.topic_replaced topic=%s: it was deleted and created again; it is read from its beginning",
            self._name,
            self._topic,
        )
        await asyncio.to_thread(self._reader.stop)
        self.topic_begins(topic_id)
        former, self._keys = self._keys, set()
        self._reader = self._new_reader()
        try:
            await self._replay(REPLAY_S)
        except PenstockError:
            self._keys |= former
            raise
        self._topic_id = topic_id
        if withdrawn := self.withdrawals(sorted(former - self._keys)):
            logger.warning("%s.withdrawn records=%d: the new topic does not hold them", self._name, len(withdrawn))
            self._run(withdrawn)

    # -- on the reader's thread

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        records = [record for message in messages if (record := self._read(message)) is not None]
        self._keys.update(key for record in records if (key := self.key_of(record)) is not None)
        for begin in range(0, len(records), SLICE):
            if not self._hand_over(records[begin : begin + SLICE]):
                return

    def _read(self, message: RawMessage) -> T | None:
        """A registry that is away is waited for: an order that is passed over is one that is not heard."""
        while not self._stopping.is_set():
            try:
                return self._read_message(message)
            except RegistryUnavailable as error:
                logger.warning("%s.waits_for_registry error=%s", self._name, error)
                self._stopping.wait(REGISTRY_RETRY_S)
            except DecodeError as error:
                logger.warning("%s.undecodable offset=%d error=%s", self._name, message.offset, error.code)
                return None
            except Exception:
                logger.exception("%s.unreadable offset=%d", self._name, message.offset)
                return None
        return None

    def _hand_over(self, records: list[T]) -> bool:
        """False when the worker stops and nobody listens any more."""
        done = threading.Event()
        try:
            self._loop.call_soon_threadsafe(self._run_slice, records, done)
        except RuntimeError:
            logger.debug("%s.loop_closed", self._name)
            return False
        while not done.wait(0.2):
            if self._stopping.is_set():
                return False
        return True

    # -- on the event loop

    def _run_slice(self, records: list[T], done: threading.Event) -> None:
        try:
            self._run(records)
        finally:
            done.set()

    def _run(self, records: list[T]) -> None:
        try:
            self._on_records(records)
        except Exception:
            logger.exception("%s.failed records=%d; each is tried by itself", self._name, len(records))
            self._run_one_by_one(records)

    def _run_one_by_one(self, records: list[T]) -> None:
        for record in records:
            try:
                self._on_records([record])
            except Exception:
                logger.exception("%s.passed_over", self._name)


class PeerReports(RecordFollower[WorkerState]):
    """Follows the topic from its start; `on_reports` runs on the event loop, in log order."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        on_reports: Callable[[Sequence[WorkerState]], None],
    ) -> None:
        self._arrivals = Arrivals()
        self._arrivals.begin(sys.maxsize)

        def read(message: RawMessage) -> WorkerState | None:
            return report_in(message, codec, self._arrivals.heard_ms(message, steady_ms()))

        super().__init__(settings, settings.names.worker, read, loop, on_reports, name="peers")

    async def start(self, deadline_s: float) -> None:
        await super().start(deadline_s)
        self._arrivals.begin(0)


def report_in(message: RawMessage, codec: Codec, heard_ms: int) -> WorkerState | None:
    """A worker's report, with the time at which it was heard here for that of the other's clock; None of all else."""
    if message.value is None or is_of_gateway(message.key):
        return None
    return replace(codec.decode(message.value, WorkerState), updated_at=heard_ms)


class DesiredFollower(RecordFollower[DesiredRecord]):
    """Follows the topic from its start; `on_records` runs on the event loop, in log order.

    `on_topic` gets Kafka's id of a topic before its first record, also of one that was made again.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        on_records: Callable[[Sequence[DesiredRecord]], None],
        on_topic: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        super().__init__(
            settings,
            settings.names.desired,
            lambda message: read_record(message, codec),
            loop,
            on_records,
            name="desired",
        )
        self._on_topic = on_topic

    def topic_begins(self, topic_id: str | None) -> None:
        self._on_topic(topic_id)

    def key_of(self, record: DesiredRecord) -> str:
        return record.key

    def withdrawals(self, keys: Sequence[str]) -> list[DesiredRecord]:
        return [DesiredRecord(key, None, WITHDRAWN) for key in keys]
