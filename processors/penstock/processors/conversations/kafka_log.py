"""Conversation topics on Kafka. Each thread keeps one consumer and assigns it again: creating one costs far more."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.common import admin
from penstock.common.kafka_errors import from_kafka
from penstock.common.reader import make_consumer
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.processors.conversations.appending import append_in_order
from penstock.processors.conversations.turns import TopicRecord
from penstock.schemas.errors import BrokerUnavailable, Conflict, InsufficientCapacity, PenstockError

CREATE_S = 5.0
"""Making a topic may take longer: it is asked for only after Kafka answered."""
COUNT_AGAIN_S = 30.0
_REMEMBERED_IDS = 4096

_PARTITION_EOF = KafkaError._PARTITION_EOF  # pyright: ignore[reportPrivateUsage]


class KafkaLog:
    """The `Log` of `Turns`, with a topic for each. All but `append` block, in one of the turns' threads."""

    is_shared = False

    def __init__(
        self,
        settings: KafkaSettings,
        transport: AsyncTransport,
        *,
        max_topics: int,
        durability: str = "replicas",
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._max_topics = max_topics
        self._durability = durability
        self._local = threading.local()
        self._lock = threading.Lock()
        self._verified: dict[str, str] = {}
        self._count: tuple[float, int] | None = None

    def find(self, topic: str, timeout_s: float) -> str | None:
        return admin.topic_id(self._settings, topic, timeout_s)

    def open(self, topic: str, timeout_s: float) -> str:
        topic_id = self.find(topic, timeout_s)
        if topic_id is None:
            self._refuse_beyond_limit(timeout_s)
            admin.create_conversation_topic(
                self._settings, topic, durability=self._durability, timeout_s=max(CREATE_S, timeout_s)
            )
            topic_id = self._wait_for_id(topic, timeout_s)
        if self._verified.get(topic) != topic_id:
            self._verify_compacted(topic, timeout_s)
            with self._lock:
                if len(self._verified) > _REMEMBERED_IDS:
                    self._verified.clear()
                self._verified[topic] = topic_id
        return topic_id

    def read(self, topic: str, from_offset: int, timeout_s: float) -> list[TopicRecord]:
        try:
            return self._read(self._consumer(), topic, from_offset, timeout_s)
        except (PenstockError, KafkaException) as error:
            self._forget_consumer()
            if isinstance(error, KafkaException):
                raise from_kafka(error, f"read {topic}", topic, operation="READ") from error
            raise

    def _read(self, consumer: Consumer, topic: str, from_offset: int, timeout_s: float) -> list[TopicRecord]:
        low, high = self._watermarks(consumer, topic, timeout_s)
        begin = max(low, from_offset)
        if begin >= high:
            return []
        consumer.assign([TopicPartition(topic, 0, begin)])
        try:
            return self._read_until(consumer, topic, high, timeout_s)
        finally:
            consumer.unassign()

    def _read_until(self, consumer: Consumer, topic: str, high: int, timeout_s: float) -> list[TopicRecord]:
        """Records below `high`. The time limit runs again with each record: a long conversation may take longer."""
        records: list[TopicRecord] = []
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            message = consumer.poll(0.1)
            if message is None:
                continue
            error, offset = message.error(), message.offset() or 0
            if error is None:
                if offset < high:
                    records.append((offset, message.key() or b"", message.value()))
                reached = offset + 1
                give_up = time.monotonic() + timeout_s
            elif error.code() == _PARTITION_EOF:  # compaction may have emptied the last offsets
                reached = offset
            else:
                raise from_kafka(error, f"read {topic}", topic, operation="READ")
            if reached >= high:
                return records
        raise BrokerUnavailable(f"{topic}: nothing was heard for {timeout_s:.0f} s")

    async def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        return await append_in_order(self._transport, topic, 0, records)

    def _consumer(self) -> Consumer:
        consumer: Consumer | None = getattr(self._local, "consumer", None)
        if consumer is None:
            consumer = self._local.consumer = make_consumer(self._settings, fetch_wait_ms=10, buffer_kbytes=4096)
        return consumer

    def _forget_consumer(self) -> None:
        """After a broker's restart a consumer can be refused for minutes, for the leader epoch that it remembers."""
        consumer: Consumer | None = getattr(self._local, "consumer", None)
        self._local.consumer = None
        if consumer is not None:
            consumer.close()

    def _watermarks(self, consumer: Consumer, topic: str, timeout_s: float) -> tuple[int, int]:
        """(low, high) of the topic's one partition; a topic made a moment ago has no leader for some milliseconds."""
        give_up = time.monotonic() + timeout_s
        while True:
            left_s = give_up - time.monotonic()
            try:
                offsets: Any = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=max(0.1, left_s))
            except KafkaException as error:
                if left_s <= 0:
                    raise BrokerUnavailable(f"{topic}: {error}") from error
            else:
                if offsets is not None:
                    return offsets
            if left_s <= 0:
                raise BrokerUnavailable(f"no answer for the end of {topic}")
            time.sleep(0.01)

    def _wait_for_id(self, topic: str, timeout_s: float) -> str:
        give_up = time.monotonic() + timeout_s
        while (topic_id := self.find(topic, timeout_s)) is None:
            if time.monotonic() > give_up:
                raise BrokerUnavailable(f"{topic} was made but is not visible")
            time.sleep(0.01)
        return topic_id

    def _verify_compacted(self, topic: str, timeout_s: float) -> None:
        policy = admin.topic_config(self._settings, topic, timeout_s).get("cleanup.policy", "")
        if policy != "compact":
            raise Conflict(f"{topic} has cleanup.policy={policy!r}, a conversation needs 'compact'")

    def _refuse_beyond_limit(self, timeout_s: float) -> None:
        """Count conversations at most every 30 s; those made here in between are added."""
        now = time.monotonic()
        with self._lock:
            counted = self._count
        if counted is None or now - counted[0] > COUNT_AGAIN_S:
            counted = (now, admin.count_conversations(self._settings, timeout_s))
        if counted[1] >= self._max_topics:
            raise InsufficientCapacity(
                f"there are {counted[1]} conversations, conversations.max_topics allows {self._max_topics}",
                details={"need": counted[1] + 1, "capacity": self._max_topics},
            )
        with self._lock:
            self._count = (counted[0], counted[1] + 1)
