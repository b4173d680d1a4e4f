"""Turns of conversations on Kafka, as DESIGN §3 says: read to the end, own input once, answer once, the winner counts.

`ConversationLog` is the pure state of one topic as read so far. `Turns` does the blocking work in a small pool of
threads, each with a consumer of its own that is kept from turn to turn; the event loop only awaits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.producers import admin
from penstock.producers.kafka_errors import from_kafka
from penstock.producers.reader import make_consumer
from penstock.producers.settings import KafkaSettings
from penstock.producers.transport import Delivery, Transport
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, Conflict, DecodeError, InsufficientCapacity
from penstock.schemas.records import ConversationMessage, InferenceRequest, Usage, conversation_message_key

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PARTITION_EOF = KafkaError._PARTITION_EOF  # pyright: ignore[reportPrivateUsage]


class LostOwnership(Exception):
    """The request's partition went to another worker: nothing more may be written for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record of a conversation topic; `message` is None for what a tombstone or a foreign hand left."""

    offset: int
    key: bytes
    message: ConversationMessage


@dataclass(slots=True)
class ConversationLog:
    """What has been read of one conversation: everything below `next_offset` of the topic with this Kafka id."""

    topic_id: str
    next_offset: int = 0
    entries: list[Entry] = field(default_factory=list[Entry])

    def apply(self, offset: int, key: bytes, message: ConversationMessage | None) -> None:
        """Take the next record. A tombstone (None) removes what its key named."""
        if offset < self.next_offset:
            return
        self.next_offset = offset + 1
        if message is None:
            self.entries = [entry for entry in self.entries if entry.key != key]
        else:
            self.entries.append(Entry(offset=offset, key=key, message=message))

    def answer(self, request_id: str) -> ConversationMessage | None:
        """The answer that counts: the one with the lowest offset."""
        for entry in self.entries:
            if entry.message.direction == "out" and entry.message.request_id == request_id:
                return entry.message
        return None

    def inputs(self, request_id: str) -> dict[int, int]:
        """Index → lowest offset of this request's own messages."""
        found: dict[int, int] = {}
        for entry in self.entries:
            if entry.message.direction == "in" and entry.message.request_id == request_id:
                found.setdefault(entry.message.index, entry.offset)
        return found

    def before(self, offset: int, request_id: str) -> list[ConversationMessage]:
        """The messages that count below `offset`, in log order, without the given request's own."""
        seen: set[tuple[str | None, str, int]] = set()
        found: list[ConversationMessage] = []
        for entry in self.entries:
            message = entry.message
            if entry.offset >= offset:
                break
            identity = (message.request_id, message.direction, message.index)
            if message.request_id == request_id or message.direction == "summary" or identity in seen:
                continue
            seen.add(identity)
            found.append(message)
        return found

    def keys_of(self, request_id: str) -> list[bytes]:
        return [entry.key for entry in self.entries if entry.message.request_id == request_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """Either the answer that stands already, or the history before this request's own input."""

    topic: str
    answer: ConversationMessage | None
    history: list[dict[str, Any]]


class Log(Protocol):
    """Reading and appending one conversation topic: Kafka in the worker, a list in tests. All methods block."""

    def find(self, topic: str) -> str | None:
        """Kafka's id of the topic; None when there is none."""
        ...

    def open(self, topic: str) -> str:
        """Make sure that the compacted topic exists; Kafka's id of it."""
        ...

    def read(self, topic: str, from_offset: int) -> list[tuple[int, bytes, bytes | None]]:
        """Records from an offset to the end that the topic has now."""
        ...

    def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        """Append and wait for the broker; the offsets. Raises PenstockError."""
        ...


class Turns:
    """Conversation turns for one worker; at most one per conversation is open at a time (the scheduler's lines)."""

    def __init__(
        self,
        log: Log,
        codec: Codec,
        topic_of: Callable[[str, str], str],
        *,
        threads: int,
        cached: int,
        after_append: Callable[[], None] = lambda: None,
    ) -> None:
        self._log = log
        self._codec = codec
        self._topic_of = topic_of
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="turns")
        self._cached = cached
        self._cache: OrderedDict[str, ConversationLog] = OrderedDict()
        self._lock = threading.Lock()
        self._after_append = after_append

    async def begin(self, request: InferenceRequest, epoch: int, now_ms: int, mine: Callable[[], bool]) -> TurnStart:
        """Read to the end; append the request's own messages unless they stand there; the context before them."""
        return await self._run(lambda: self._begin(request, epoch, now_ms, mine))

    async def answer(self, request: InferenceRequest) -> ConversationMessage | None:
        """The answer that stands already, appending nothing and making no topic."""
        return await self._run(lambda: self._standing_answer(request))

    async def finish(self, answer: ConversationMessage, mine: Callable[[], bool]) -> ConversationMessage:
        """Append the answer, read back, and return the one that counts."""
        return await self._run(lambda: self._finish(answer, mine))

    async def erase(self, tenant: str, conversation_id: str, request_id: str) -> int:
        """Write tombstones for all of a request's messages; how many."""
        return await self._run(lambda: self._erase(tenant, conversation_id, request_id))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _begin(self, request: InferenceRequest, epoch: int, now_ms: int, mine: Callable[[], bool]) -> TurnStart:
        topic = self._topic_of(request.tenant, request.conversation_id or "")
        log = self._read(topic)
        answer = log.answer(request.request_id)
        if answer is not None:
            return TurnStart(topic=topic, answer=answer, history=[])
        own = log.inputs(request.request_id)
        missing = [message for message in _new_messages(request, epoch, now_ms) if message.index not in own]
        if missing:
            if not mine():
                raise LostOwnership
            own |= self._append_messages(topic, log, missing)
        history = log.before(min(own.values(), default=log.next_offset), request.request_id)
        return TurnStart(topic=topic, answer=None, history=[_as_chat(message) for message in history])

    def _standing_answer(self, request: InferenceRequest) -> ConversationMessage | None:
        log = self._read_apart(self._topic_of(request.tenant, request.conversation_id or ""))
        return None if log is None else log.answer(request.request_id)

    def _read_apart(self, topic: str) -> ConversationLog | None:
        """The whole topic in a log of its own: a turn of the same conversation may be working on the cached one."""
        topic_id = self._log.find(topic)
        if topic_id is None:
            return None
        log = ConversationLog(topic_id)
        self._extend(log, self._log.read(topic, 0))
        return log

    def _finish(self, answer: ConversationMessage, mine: Callable[[], bool]) -> ConversationMessage:
        topic = self._topic_of(answer.tenant, answer.conversation_id)
        log = self._cached_log(topic) or self._read(topic)
        if not mine():
            raise LostOwnership
        self._append_messages(topic, log, [answer])
        self._after_append()
        return log.answer(answer.request_id or "") or answer

    def _erase(self, tenant: str, conversation_id: str, request_id: str) -> int:
        topic = self._topic_of(tenant, conversation_id)
        log = self._read_apart(topic)
        keys = [] if log is None else log.keys_of(request_id)
        if keys:
            self._log.append(topic, [(key, None) for key in keys])
        return len(keys)

    def _append_messages(self, topic: str, log: ConversationLog, messages: list[ConversationMessage]) -> dict[int, int]:
        """Append and bring the log to its end; index → offset. What another worker wrote in between is read too."""
        records = [(conversation_message_key(m).encode(), self._codec.encode(m)) for m in messages]
        offsets = self._log.append(topic, records)
        if offsets == list(range(log.next_offset, log.next_offset + len(offsets))):
            for offset, (key, _), message in zip(offsets, records, messages, strict=True):
                log.apply(offset, key, message)
        else:
            self._extend(log, self._log.read(topic, log.next_offset))
        return {message.index: offset for message, offset in zip(messages, offsets, strict=True)}

    def _read(self, topic: str) -> ConversationLog:
        """The topic to its end: the cached part, if it is of the same Kafka topic, and the unseen tail."""
        topic_id = self._log.open(topic)
        log = self._cached_log(topic)
        if log is None or log.topic_id != topic_id:
            log = ConversationLog(topic_id)
        self._extend(log, self._log.read(topic, log.next_offset))
        self._remember(topic, log)
        return log

    def _extend(self, log: ConversationLog, records: list[tuple[int, bytes, bytes | None]]) -> None:
        for offset, key, value in records:
            message: ConversationMessage | None = None
            if value is not None:
                try:
                    message = self._codec.decode(value, ConversationMessage)
                except DecodeError as error:
                    logger.warning("turns.undecodable offset=%d error=%s", offset, error.code)
                    log.next_offset = offset + 1
                    continue
            log.apply(offset, key, message)

    def _cached_log(self, topic: str) -> ConversationLog | None:
        with self._lock:
            return self._cache.get(topic)

    def _remember(self, topic: str, log: ConversationLog) -> None:
        with self._lock:
            self._cache[topic] = log
            self._cache.move_to_end(topic)
            while len(self._cache) > self._cached:
                self._cache.popitem(last=False)


def _new_messages(request: InferenceRequest, epoch: int, now_ms: int) -> list[ConversationMessage]:
    """The request's own messages as conversation records."""
    messages: list[dict[str, Any]] = request.payload.get("messages") or []
    return [
        ConversationMessage(
            request_id=request.request_id,
            tenant=request.tenant,
            conversation_id=request.conversation_id or "",
            direction="in",
            index=index,
            epoch=epoch,
            attempt=1,
            role=str(message["role"]),
            content=str(message["content"]),
            name=message.get("name"),
            created_at=now_ms,
            metadata=dict(request.metadata),
        )
        for index, message in enumerate(messages)
    ]


def answer_message(
    request: InferenceRequest,
    text: str,
    *,
    epoch: int,
    attempt: int,
    model: str | None,
    finish_reason: str | None,
    usage: Usage | None,
    now_ms: int,
) -> ConversationMessage:
    """The record that keeps a request's answer."""
    return ConversationMessage(
        request_id=request.request_id,
        tenant=request.tenant,
        conversation_id=request.conversation_id or "",
        direction="out",
        index=0,
        epoch=epoch,
        attempt=attempt,
        role="assistant",
        content=text,
        name=None,
        created_at=now_ms,
        model=model,
        finish_reason=finish_reason,
        usage=usage,
        metadata=dict(request.metadata),
    )


def _as_chat(message: ConversationMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        found["name"] = message.name
    return found


class KafkaLog:
    """Conversation topics on Kafka. Each thread keeps one consumer and re-assigns it: creating one costs far more."""

    def __init__(
        self,
        settings: KafkaSettings,
        transport: Transport,
        *,
        max_topics: int,
        deadline_s: float,
        durability: str = "replicas",
    ) -> None:
        self._durability = durability
        self._settings = settings
        self._transport = transport
        self._max_topics = max_topics
        self._deadline_s = deadline_s
        self._local = threading.local()
        self._lock = threading.Lock()
        self._verified: dict[str, str] = {}
        self._count: tuple[float, int] | None = None

    def find(self, topic: str) -> str | None:
        return admin.topic_id(self._settings, topic)

    def open(self, topic: str) -> str:
        found = self.find(topic)
        if found is None:
            self._refuse_beyond_limit()
            admin.create_conversation_topic(self._settings, topic, durability=self._durability)
            found = self._wait_for_id(topic)
        if self._verified.get(topic) != found:
            self._verify_compacted(topic)
            with self._lock:
                if len(self._verified) > 4096:
                    self._verified.clear()
                self._verified[topic] = found
        return found

    def read(self, topic: str, from_offset: int) -> list[tuple[int, bytes, bytes | None]]:
        give_up = time.monotonic() + self._deadline_s
        consumer = self._consumer()
        low, high = self._watermarks(consumer, topic, give_up)
        begin = max(low, from_offset)
        if begin >= high:
            return []
        consumer.assign([TopicPartition(topic, 0, begin)])
        try:
            return self._read_until(consumer, topic, high, give_up)
        finally:
            consumer.unassign()

    def _read_until(
        self, consumer: Consumer, topic: str, high: int, give_up: float
    ) -> list[tuple[int, bytes, bytes | None]]:
        found: list[tuple[int, bytes, bytes | None]] = []
        while time.monotonic() < give_up:
            message = consumer.poll(0.1)
            if message is None:
                continue
            error, offset = message.error(), message.offset() or 0
            if error is None:
                if offset < high:
                    found.append((offset, message.key() or b"", message.value()))
                reached = offset + 1
            elif error.code() == _PARTITION_EOF:  # compaction may have emptied the last offsets
                reached = offset
            else:
                raise from_kafka(error, f"read {topic}", topic)
            if reached >= high:
                return found
        raise BrokerUnavailable(f"{topic} was not read to its end within {self._deadline_s:.0f} s")

    def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        deliveries: list[Delivery | None] = [None] * len(records)
        done = threading.Semaphore(0)

        def delivered(number: int) -> Callable[[Delivery], None]:
            def note(delivery: Delivery) -> None:
                deliveries[number] = delivery
                done.release()

            return note

        for number, (key, value) in enumerate(records):
            self._transport.send(topic, value, key=key, partition=0, on_delivery=delivered(number))
        for _ in records:
            done.acquire()  # without a limit: given up here, the record could still be appended, and then once more
        for delivery in deliveries:
            if delivery is not None and delivery.error is not None:
                raise delivery.error
        return [delivery.offset for delivery in deliveries if delivery is not None]

    def _consumer(self) -> Consumer:
        consumer: Consumer | None = getattr(self._local, "consumer", None)
        if consumer is None:
            consumer = self._local.consumer = make_consumer(self._settings, fetch_wait_ms=10, buffer_kbytes=4096)
        return consumer

    def _watermarks(self, consumer: Consumer, topic: str, give_up: float) -> tuple[int, int]:
        """(low, high) of the topic's one partition; a topic made a moment ago has no leader for some milliseconds."""
        while True:
            try:
                found: Any = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=2.0)
            except KafkaException as error:
                if time.monotonic() > give_up:
                    raise BrokerUnavailable(f"{topic}: {error}") from error
            else:
                if found is not None:
                    return found
            if time.monotonic() > give_up:
                raise BrokerUnavailable(f"no answer for the end of {topic}")
            time.sleep(0.01)

    def _wait_for_id(self, topic: str) -> str:
        give_up = time.monotonic() + self._deadline_s
        while (found := admin.topic_id(self._settings, topic)) is None:
            if time.monotonic() > give_up:
                raise BrokerUnavailable(f"{topic} was made but is not visible")
            time.sleep(0.01)
        return found

    def _verify_compacted(self, topic: str) -> None:
        policy = admin.topic_config(self._settings, topic).get("cleanup.policy", "")
        if policy != "compact":
            raise Conflict(f"{topic} has cleanup.policy={policy!r}, a conversation needs 'compact'")

    def _refuse_beyond_limit(self) -> None:
        """Count conversations at most every 30 s; those made here in between are added."""
        now = time.monotonic()
        with self._lock:
            counted = self._count
        if counted is None or now - counted[0] > 30:
            counted = (now, admin.count_conversations(self._settings))
        if counted[1] >= self._max_topics:
            raise InsufficientCapacity(
                f"there are {counted[1]} conversations, conversations.max_topics allows {self._max_topics}",
                details={"need": counted[1] + 1, "capacity": self._max_topics},
            )
        with self._lock:
            self._count = (counted[0], counted[1] + 1)
