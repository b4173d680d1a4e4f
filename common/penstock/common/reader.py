"""Reading partitions without a consumer group: batches of raw records, in order, on a thread of their own.

The thread waits in `on_batch`: a callback that blocks slows the reading, and librdkafka's fetch buffer is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.common import admin
from penstock.common.kafka_errors import client_logger, from_kafka, missing_topic, wrong_configuration
from penstock.common.read_rights import ReadRights
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable, InternalError
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)


_PARTITION_EOF = KafkaError._PARTITION_EOF  # pyright: ignore[reportPrivateUsage]

STANDSTILL_S = 0.3
"""After so long without a record a reader that gets no ends looks whether any is left."""

Headers = tuple[tuple[str, bytes | None], ...]

# A header name that is not UTF-8 leaves an exception behind without raising it. An interpreted call does not notice,
# and the exception surfaces some lines later, outside any `try`; a call from C code raises it at once.
_call_headers: Callable[[Message], Any] = operator.methodcaller("headers")


@dataclass(slots=True, unsafe_hash=True)
class RawMessage:
    """A record as it is in the log; `value` is None for a tombstone. Times in ms since the epoch.

    Nobody changes one; a frozen class would cost a call for each field.
    `headers` is empty and `headers_readable` False when a header's name is not UTF-8.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    headers_readable: bool = True


Select = Callable[[Sequence[Message]], Sequence[RawMessage]]
"""What `on_batch` gets for some messages of librdkafka, which are no errors."""


def make_consumer(
    settings: KafkaSettings,
    *,
    fetch_wait_ms: int = 100,
    buffer_kbytes: int = 16_384,
    reports_ends: bool = True,
    overrides: Mapping[str, Any] | None = None,
) -> Consumer:
    """A consumer that assigns itself and commits nothing. `fetch_wait_ms` delays only seeks and new assignments.

    With `reports_ends` it reports each end of a partition that it reaches, which costs as much as a record.
    `overrides` are settings of librdkafka that are above all others.
    """
    config = {
        **settings.librdkafka(),
        # librdkafka wants a group's name; without subscribing or committing it is never joined.
        "group.id": "penstock-reader",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "enable.partition.eof": reports_ends,
        "fetch.wait.max.ms": fetch_wait_ms,
        "fetch.error.backoff.ms": 50,
        "fetch.queue.backoff.ms": 20,
        "queued.max.messages.kbytes": buffer_kbytes,
        **(overrides or {}),
    }
    try:
        return Consumer(config, logger=client_logger)
    except KafkaException as error:
        raise wrong_configuration(error) from error


class PartitionReader:
    """Reads all partitions of `topics` from their beginning.

    `topics` may instead map (topic, partition) to the offset to begin at. `on_batch` runs on the reader's thread with
    up to `batch_size` records. When it raises, reading ends and `failure` says why. Without `reports_ends` that costs
    less, and `wait_until_caught_up` takes longer when no record is before a partition's end. `select` returns what is
    passed on of the records that came, by default all. `on_idle` runs on the same thread when `poll_s` brought nothing.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        topics: Sequence[str] | Mapping[TP, int],
        on_batch: Callable[[Sequence[RawMessage]], None],
        *,
        batch_size: int = 500,
        fetch_wait_ms: int = 100,
        poll_s: float = 0.1,
        reports_ends: bool = True,
        select: Select | None = None,
        on_idle: Callable[[], None] = lambda: None,
        name: str = "penstock-reader",
    ) -> None:
        self._select: Select = select or (lambda messages: [raw_message(message) for message in messages])
        self._settings = settings
        self._topics = topics
        self._on_batch = on_batch
        self._on_idle = on_idle
        self._batch_size = batch_size
        self._poll_s = poll_s
        self._reports_ends = reports_ends
        self._consumer = make_consumer(settings, fetch_wait_ms=fetch_wait_ms, reports_ends=reports_ends)
        self.rights = ReadRights(settings)
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._positions: dict[TP, int] = {}
        self._calls: deque[Callable[[], object]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._read_forever, name=name, daemon=True)
        self.failure: BaseException | None = None

    def start(self, timeout_s: float = 10.0) -> None:
        """Look up where to begin, then read. Raises NotFound for a missing topic, BrokerUnavailable."""
        if isinstance(self._topics, Mapping):
            begin = dict(self._topics)
        else:
            begin = self._begin(self._topics, timeout_s)
        self._add(begin)
        self._thread.start()

    def add_partitions(self, begin: Mapping[TP, int]) -> None:
        """Read these as well, each from its offset, unless they are read already."""
        self.call(lambda: self._add({tp: offset for tp, offset in begin.items() if tp not in self._positions}))

    def call(self, action: Callable[[], object]) -> None:
        """Run `action` on the reader's thread between two batches; it may use `seek` and `drop`."""
        with self._lock:
            self._calls.append(action)
            self._moved.notify_all()

    def seek(self, tp: TP, offset: int) -> None:
        """Read this partition from `offset` on, whether it was read before or not. Only inside `call`."""
        if tp in self._positions:
            self._consumer.incremental_unassign([TopicPartition(*tp)])
        self._add({tp: offset})

    def drop(self, tp: TP) -> None:
        """Read this partition no more. Only inside `call`."""
        if tp in self._positions:
            self._consumer.incremental_unassign([TopicPartition(*tp)])
            with self._lock:
                del self._positions[tp]

    def pause(self, partitions: Iterable[TP]) -> None:
        """Read these no further for now. Only on the reader's thread: inside `call`, `on_batch` or `on_idle`."""
        if read := [TopicPartition(*tp) for tp in partitions if tp in self._positions]:
            self._consumer.pause(read)

    def resume(self, partitions: Iterable[TP]) -> None:
        """Read these on from where they were paused. Only on the reader's thread, as `pause`."""
        if read := [TopicPartition(*tp) for tp in partitions if tp in self._positions]:
            self._consumer.resume(read)

    def positions(self) -> dict[TP, int]:
        """The offset after the last record that `on_batch` has finished with, for each partition."""
        with self._lock:
            return dict(self._positions)

    def wait_until_caught_up(self, deadline_s: float, *, partitions: Iterable[TP] | None = None) -> None:
        """Wait until all that stood on the topics when this was called went through `on_batch`.

        Raises BrokerUnavailable when that takes longer than `deadline_s`, InternalError when reading has ended.
        """
        give_up = time.monotonic() + deadline_s
        wanted = self.positions() if partitions is None else partitions
        goal = admin.end_offsets(self._settings, wanted, deadline_s)
        with self._moved:
            while behind := [tp for tp, end in goal.items() if self._positions.get(tp, 0) < end]:
                if self.failure is not None or self._stopping:
                    raise InternalError(f"the reader has ended: {self.failure or 'stopped'}")
                left = give_up - time.monotonic()
                if left <= 0:
                    why = f": {reason}" if (reason := self.rights.reason) else ""
                    raise BrokerUnavailable(f"{behind[0][0]} was not read to its end within {deadline_s:.0f} s{why}")
                if not self._moved.wait(min(left, STANDSTILL_S)) and not self._reports_ends:
                    self._pass_empty_ends({tp: (self._positions.get(tp, 0), goal[tp]) for tp in behind})

    def _pass_empty_ends(self, ranges: Mapping[TP, tuple[int, int]]) -> None:
        """Count as read what holds no record: markers of transactions, and what was compacted. Called with the lock."""
        self._lock.release()
        try:
            empty = empty_ranges(self._settings, ranges)
        finally:
            self._lock.acquire()
        for tp, end in empty.items():
            if tp in self._positions:
                self._positions[tp] = max(self._positions[tp], end)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread (after the batch it is in) and leave the broker. May be called twice."""
        with self._lock:
            already, self._stopping = self._stopping, True
            self._moved.notify_all()
        if already:
            return
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        else:
            self._consumer.close()

    def _begin(self, topics: Sequence[str], timeout_s: float) -> dict[TP, int]:
        counts = admin.partition_counts(self._settings, topics, timeout_s)
        for topic in topics:
            if topic not in counts:
                raise missing_topic(topic)
        partitions = [(topic, number) for topic in topics for number in range(counts[topic])]
        return admin.begin_offsets(self._settings, partitions, timeout_s)

    def _add(self, begin: Mapping[TP, int]) -> None:
        if not begin:
            return
        self._consumer.incremental_assign([TopicPartition(*tp, offset) for tp, offset in begin.items()])
        with self._lock:
            self._positions.update(begin)

    def _read_forever(self) -> None:
        try:
            while not self._stopping:
                while self._calls:
                    self._calls.popleft()()
                if not self._positions:
                    with self._moved:
                        if not self._calls and not self._stopping:
                            self._moved.wait(1.0)
                    continue
                self._read_batch()
        except BaseException as error:
            logger.exception("reader.failed thread=%s", threading.current_thread().name)
            self.failure = error
        finally:
            self._consumer.close()
            with self._moved:
                self._moved.notify_all()

    def _read_batch(self) -> None:
        self.rights.look()
        # consume() alone would wait until its whole batch is full or the time is over.
        first = self._consumer.poll(self._poll_s)
        if first is None:
            self._on_idle()
            return
        messages: list[Message] = []
        failed: list[Message] = []
        reached: dict[TP, int] = {}
        for message in [first, *self._consumer.consume(self._batch_size - 1, 0)]:
            error = message.error()
            if error is None:
                messages.append(message)
                reached[message.topic() or "", message.partition() or 0] = (message.offset() or 0) + 1
            elif error.code() == _PARTITION_EOF:
                # Behind the last record there may be offsets that compaction emptied: the end is reached all the same.
                tp = (message.topic() or "", message.partition() or 0)
                reached[tp] = max(reached.get(tp, 0), message.offset() or 0)
            else:
                failed.append(message)
        self.rights.granted(topic for topic, _ in reached)
        for message in failed:
            if (error := message.error()) is not None and not self.rights.note(error, message.topic()):
                logger.warning("reader.error topic=%s error=%s", message.topic(), error)
        if messages and (batch := self._select(messages)):
            self._on_batch(batch)
        with self._moved:
            for tp, offset in reached.items():
                if tp in self._positions:
                    self._positions[tp] = max(self._positions[tp], offset)
            self._moved.notify_all()


def message_headers(message: Message) -> tuple[Headers, bool]:
    """The headers of a record, and whether they could be read.

    Asked for twice, headers that are not readable come with null pointers in them: call this once per message.
    """
    try:
        headers = _call_headers(message)
    except (SystemError, UnicodeDecodeError):
        return (), False
    return (tuple(headers) if headers else ()), True


def raw_message(message: Message, without_headers: Container[str] = ()) -> RawMessage:
    """A record of librdkafka as a value; that of a topic in `without_headers` without its headers."""
    topic = message.topic() or ""
    headers, readable = ((), True) if topic in without_headers else message_headers(message)
    return RawMessage(
        topic,
        message.partition() or 0,
        message.offset() or 0,
        message.timestamp()[1],
        message.key(),
        message.value(),
        headers,
        readable,
    )


class BatchQueue:
    """Carries batches from a reader's thread to an event loop. At most `limit` batches wait; then the reader waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int = 8) -> None:
        self._loop = loop
        self._room = threading.Semaphore(limit)
        self._queue: asyncio.Queue[Sequence[RawMessage]] = asyncio.Queue()
        self._closed = False

    def put(self, batch: Sequence[RawMessage]) -> None:
        """For `on_batch`: hand over, waiting for room."""
        while not self._room.acquire(timeout=0.2):
            if self._closed:
                return
        if not self._closed:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, batch)

    async def get(self) -> Sequence[RawMessage]:
        """The oldest batch that waits."""
        batch = await self._queue.get()
        self._room.release()
        return batch

    def close(self) -> None:
        """Let a waiting reader go; what is handed over from now on is dropped. Call before `PartitionReader.stop`."""
        self._closed = True


def read_to_end(
    settings: KafkaSettings,
    topic: str,
    from_offset: int = 0,
    *,
    partition: int | None = None,
    deadline_s: float = 10.0,
) -> list[RawMessage]:
    """The records from `from_offset` to the end that the topic has now, partition by partition.

    Raises NotFound when the topic does not exist, BrokerUnavailable when reading takes longer than `deadline_s`.
    """
    give_up = time.monotonic() + deadline_s
    count = admin.partition_counts(settings, [topic], deadline_s).get(topic)
    if count is None:
        raise missing_topic(topic)
    partitions = [(topic, n) for n in (range(count) if partition is None else [partition])]
    first = admin.begin_offsets(settings, partitions, deadline_s)
    end = admin.end_offsets(settings, partitions, deadline_s)
    return read_ranges(settings, {tp: (max(from_offset, first[tp]), end[tp]) for tp in partitions}, give_up)


def read_ranges(
    settings: KafkaSettings,
    ranges: Mapping[TP, tuple[int, int]],
    give_up: float,
    most: int | None = None,
    *,
    keep: Callable[[Message], bool] = lambda _: True,
) -> list[RawMessage]:
    """The records of these ranges of offsets (from, to but not with), partition by partition; `most` of each at most.

    They must lie between the offsets that the partition has. `keep` is asked of each record as it comes.
    Raises BrokerUnavailable at `give_up` (monotonic).
    """
    ranges = {tp: (begin, end) for tp, (begin, end) in ranges.items() if begin < end}
    if not ranges:
        return []
    consumer = make_consumer(settings)
    try:
        return read_with(consumer, ranges, give_up, most, keep=keep)
    finally:
        consumer.close()


def newest_values(settings: KafkaSettings, ranges: Mapping[TP, tuple[int, int]], give_up: float) -> list[bytes]:
    """The newest value of each key, without tombstones: compaction may not have come to its older ones.

    Raises as `read_ranges`.
    """
    newest: dict[bytes, bytes | None] = {}

    def take(message: Message) -> bool:
        newest[message.key() or b""] = message.value()
        return False

    read_ranges(settings, ranges, give_up, keep=take)
    return [*filter(None, newest.values())]


def read_with(
    consumer: Consumer,
    ranges: Mapping[TP, tuple[int, int]],
    give_up: float,
    most: int | None = None,
    *,
    keep: Callable[[Message], bool] = lambda _: True,
) -> list[RawMessage]:
    """As `read_ranges`, by a consumer that is assigned these partitions for it; no range may be empty."""
    try:
        consumer.assign([TopicPartition(*tp, begin) for tp, (begin, _) in ranges.items()])
        return _read_up_to(consumer, {tp: end for tp, (_, end) in ranges.items()}, give_up, most, keep)
    except KafkaException as error:
        topic = next(iter(ranges))[0]
        raise from_kafka(error, f"read {topic}", topic, operation="READ") from error


def read_batches(
    consumer: Consumer, tp: TP, begin: int, end: int, give_up: float, most: int, *, first_by: float
) -> Iterator[list[RawMessage]]:
    """The records from `begin` to before `end` in one reading, `most` at a time; only the last batch has fewer.

    The consumer is assigned this partition for it. Raises BrokerUnavailable at `give_up` (monotonic), for the first
    batch at `first_by`; NotFound.
    """
    try:
        consumer.assign([TopicPartition(*tp, begin)])
        while begin < end:
            found = _read_up_to(consumer, {tp: end}, first_by, most, lambda _: True)
            first_by = give_up
            begin = found[-1].offset + 1 if len(found) == most else end
            yield found
    except KafkaException as error:
        raise from_kafka(error, f"read {tp[0]}", tp[0], operation="READ") from error


def empty_ranges(settings: KafkaSettings, ranges: Mapping[TP, tuple[int, int]]) -> dict[TP, int]:
    """Of these ranges of offsets (from, to but not with) those that surely hold no record, with their ends.

    Markers of transactions and compacted records leave such ranges.
    """
    give_up = time.monotonic() + 2.0
    left, empty = dict(ranges), dict[TP, int]()
    consumer = make_consumer(settings)
    try:
        consumer.assign([TopicPartition(*tp, begin) for tp, (begin, _) in ranges.items()])
        while left and (remaining := give_up - time.monotonic()) > 0:
            message = consumer.poll(remaining)
            if message is None or ((error := message.error()) is not None and error.code() != _PARTITION_EOF):
                continue
            tp = (message.topic() or "", message.partition() or 0)
            _, end = left.pop(tp, (0, 1 << 63))
            if (message.offset() or 0) >= end:
                empty[tp] = end
    finally:
        consumer.close()
    return empty


def _read_up_to(
    consumer: Consumer,
    left: dict[TP, int],
    give_up: float,
    most: int | None,
    keep: Callable[[Message], bool],
) -> list[RawMessage]:
    found: dict[TP, list[RawMessage]] = {tp: [] for tp in left}
    while left:
        if (remaining := give_up - time.monotonic()) <= 0:
            topic = next(iter(left))[0]
            raise BrokerUnavailable(f"{topic} was not read to its end in time", retry_after_s=1.0)
        message = consumer.poll(min(remaining, 0.2))
        if message is None:
            continue
        tp, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
        error = message.error()
        if error is None:
            if offset < left.get(tp, -1) and keep(message):
                found[tp].append(raw_message(message))
            reached = offset + 1
        elif error.code() == _PARTITION_EOF:
            reached = offset
        else:
            failure = from_kafka(error, f"read {tp[0]}", tp[0], operation="READ")
            if not isinstance(failure, BrokerUnavailable):  # what passes by itself is waited for
                raise failure
            continue
        if reached >= left.get(tp, reached + 1) or (tp in left and most is not None and len(found[tp]) >= most):
            del left[tp]
    return [message for tp in found for message in found[tp]]
