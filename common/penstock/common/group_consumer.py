"""Reads topics as a member of a consumer group, on a thread of its own, and commits what it is given.

Decides nothing: batches, assignments and losses of partitions are reported on the event loop. Before a partition goes
to another member the loop has ended its work for it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.common.group_names import group_name
from penstock.common.kafka_errors import client_logger, missing_right
from penstock.common.lost_brokers import LostBrokers, let_go
from penstock.common.read_rights import ReadRights
from penstock.common.reader import Headers, message_headers
from penstock.common.settings import KafkaSettings
from penstock.common.starting import Starting
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

_BATCH = 100
_POLL_S = 0.1
REVOKE_S = 20.0
"""So long the loop may take to end its work for partitions that go to another member."""


@dataclass(frozen=True, slots=True)
class Read:
    """A message as it was read: its place, its value (None for a tombstone) and its time in ms since the epoch."""

    tp: TP
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Headers = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Called on the event loop."""

    on_batch: Callable[[Sequence[Read]], None]
    on_assigned: Callable[[list[TP]], None]
    on_revoked: Callable[[list[TP]], Coroutine[Any, Any, None]]
    """Nobody else gets the partitions before it ends, unless they are lost already."""
    on_failure: Callable[[str], None]
    wants: Callable[[Headers], bool] | None = None
    """Which records are passed on, by their headers, asked on the reader's thread; without it all are, headers left
    out.
    """
    on_passed: Callable[[Mapping[TP, int]], None] = lambda _: None
    """With `wants`: the offsets behind all that was read, passed on or not, after the batch was passed on."""


class GroupConsumer:
    """A member of the group `group_id`; None: of the one that `group_name` finds for `base`."""

    def __init__(
        self, kafka: KafkaSettings, topics: Sequence[str], group_id: str | None, listener: Listener, *, base: str = ""
    ) -> None:
        self._kafka = kafka
        self._group_id, self._base = group_id, base
        self._group = group_id or base
        self._waits_for: str | None = self._waits_to_join
        self._rights = ReadRights(kafka)
        self._topics = list(topics)
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._calls: deque[Callable[[], None]] = deque()
        self._due: dict[TP, int] = {}
        self._held: set[str] = set()
        self._stopping = False
        self._lost_brokers = LostBrokers(kafka, topics[0])
        self._config: dict[str, Any] = {
            **kafka.librdkafka(),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "queued.max.messages.kbytes": 8_192,
            "partition.assignment.strategy": "cooperative-sticky",
            # By default the partitions of a member that was killed wait 45 seconds for another.
            "session.timeout.ms": 10_000,
            "heartbeat.interval.ms": 2_000,
        }
        self._consumer: Consumer
        self._thread = threading.Thread(target=self._read_forever, name="penstock-group", daemon=True)

    @property
    def waits_for(self) -> str | None:
        """Why nothing, or not all, is read. None from the first assignment on, which can be empty."""
        return self._waits_for or self._rights.reason

    @property
    def _waits_to_join(self) -> str:
        return Starting(f"not a member of the group {self._group} yet")

    def start(self) -> None:
        self._thread.start()

    def commit(self, offsets: Mapping[TP, int]) -> None:
        """Soon; at the latest when a partition is taken away."""
        due = dict(offsets)
        self._calls.append(lambda: self._due.update(due))

    def hold(self, topics: Iterable[str]) -> None:
        """Read these topics no further, and all others on."""
        held = set(topics)
        self._calls.append(lambda: self._hold(held))

    async def stop(self) -> None:
        """Commit what is due and leave the group."""
        self._stopping = True
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 20)

    # -- on the thread

    def _read_forever(self) -> None:
        try:
            if (group := self._name_group()) is not None:
                self._config["group.id"] = self._group = group
                self._waits_for = self._waits_to_join
                self._consumer = Consumer(self._config, logger=client_logger)
                try:
                    self._read_until_stopped()
                finally:
                    self._consumer.close()
        except Exception as error:
            logger.exception("group.reader_failed")
            self._tell(
                self._listener.on_failure, f"{', '.join(self._topics)} cannot be read any more: {type(error).__name__}"
            )

    def _name_group(self) -> str | None:
        """Ask until Kafka answers; None if this is stopped meanwhile."""
        while not self._stopping:
            try:
                return group_name(self._kafka, self._group_id, self._base, self._topics)
            except BrokerUnavailable as error:
                self._waits_for = f"Kafka has not said which group reads {', '.join(self._topics)}: {error}"
                logger.warning("group.not_named topics=%s error=%s: asked again", ",".join(self._topics), error)
                time.sleep(_POLL_S)
        return None

    def _read_until_stopped(self) -> None:
        self._subscribe()
        while not self._stopping:
            if self._lost_brokers.replaces(self._consumer, busy=self._read_once()):
                self._replace_consumer()
        while self._calls:
            self._calls.popleft()()
        self._commit(self._due)

    def _subscribe(self) -> None:
        self._consumer.subscribe(self._topics, on_assign=self._assigned, on_revoke=self._revoked)

    def _replace_consumer(self) -> None:
        """One that was lost while others joined still has its partitions, which may be theirs by now."""
        if held := [(one.topic, one.partition) for one in self._consumer.assignment()]:
            self._finish_work(held)
        old, self._consumer = self._consumer, Consumer(self._config, logger=client_logger)
        self._subscribe()
        let_go(old)

    def _read_once(self) -> bool:
        """Whether there were records."""
        messages = self._consumer.consume(_BATCH, _POLL_S)
        self._rights.look()
        batch: list[Read] = []
        wants, passed = self._listener.wants, dict[TP, int]()
        for message in messages:
            if (error := message.error()) is not None:
                if not self._rights.note(error, message.topic()):
                    self._read_failed(error, message.topic())
                continue
            place, offset = (str(message.topic()), int(message.partition() or 0)), int(message.offset() or 0)
            passed[place] = offset + 1
            headers = () if wants is None else message_headers(message)[0]
            if wants is None or wants(headers):
                batch.append(Read(place, offset, message.key(), message.value(), message.timestamp()[1], headers))
        if batch:
            self._tell(self._listener.on_batch, batch)
        if passed and wants is not None:
            self._tell(self._listener.on_passed, passed)
        while self._calls:
            self._calls.popleft()()
        if self._due:
            self._commit(self._due)
        return bool(passed)

    def _read_failed(self, error: KafkaError, topic: str | None) -> None:
        missing = missing_right(error, self._group, topic)
        if missing is None:
            logger.warning("group.read_error code=%s", error.name())
        elif self._waits_for != (reason := f"{self._waits_to_join}: {missing}"):
            self._waits_for = reason
            logger.warning("group.waits group=%s reason=%s", self._group, missing)

    def _commit(self, offsets: dict[TP, int]) -> None:
        owned = {(one.topic, one.partition) for one in self._consumer.assignment()}
        due = [TopicPartition(*tp, offset) for tp, offset in offsets.items() if tp in owned]
        self._due = {}
        if not due:
            return
        try:
            self._consumer.commit(offsets=due, asynchronous=False)
        except KafkaException as error:
            # It is tried again after the next read; what is never committed is read again and found done.
            logger.warning("group.commit_failed code=%s", error.args[0].name())
            self._due = {**{(one.topic, one.partition): one.offset for one in due}, **self._due}

    def _hold(self, topics: set[str]) -> None:
        self._held = topics
        assigned = self._consumer.assignment()
        self._consumer.pause([one for one in assigned if one.topic in topics])
        self._consumer.resume([one for one in assigned if one.topic not in topics])

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if consumer is not self._consumer:
            return  # it was replaced, and is closed in another thread
        self._waits_for = None
        self._calls.append(lambda: self._hold(self._held))  # a new partition comes unpaused
        self._tell(self._listener.on_assigned, [(one.topic, one.partition) for one in partitions])

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        if consumer is not self._consumer:
            return
        self._finish_work([(one.topic, one.partition) for one in partitions])
        while self._calls:
            self._calls.popleft()()
        self._commit(self._due)

    def _finish_work(self, partitions: list[TP]) -> None:
        finishing = self._listener.on_revoked(partitions)
        try:
            asyncio.run_coroutine_threadsafe(finishing, self._loop).result(REVOKE_S)
        except TimeoutError:
            logger.warning("group.revoked_with_work seconds=%.0f", REVOKE_S)
        except RuntimeError:  # the loop has ended
            finishing.close()
            self._stopping = True

    def _tell(self, what: Callable[[Any], None], argument: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(what, argument)
        except RuntimeError:  # the loop has ended
            self._stopping = True
