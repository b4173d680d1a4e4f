"""The producer that every part writes to Kafka with: idempotent, a bounded local queue, one report for each record.

`Transport` reports on its poll thread; `AsyncTransport` reports on an event loop, one hop per batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.common.background import report_fault
from penstock.common.forking import forks, keep_in_children
from penstock.common.kafka_errors import client_logger, from_kafka, too_large, wrong_configuration
from penstock.common.outgoing import Outgoing
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    InternalError,
    NotFound,
    Overloaded,
    PenstockError,
    TooLarge,
)
from penstock.schemas.records import record

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes | None]]

PARK_AFTER_S = 1.0
PARKED_S = 1.0
"""A producer without records for `PARK_AFTER_S` is polled only every `PARKED_S`."""
PURGE_S = 1.0
"""Maximum wait for the reports of a producer that has failed."""
REPLACE_S = 1.0
"""Minimum time between two replacements."""
RESENT_AT_ONCE = 1000
"""Records that a new producer gets between two polls."""
QUEUE_KIB = 64 * 1024
_RECORD_OVERHEAD_BYTES = 70
"""What a record batch of one adds to key, value and headers at most, as librdkafka counts it."""


def record_bytes(value: bytes | None, key: bytes | None, headers: Headers | None) -> int:
    """What a record counts against `max_record_bytes`."""
    size_bytes = len(value or b"") + len(key or b"")
    return size_bytes + sum(len(name) + len(content or b"") + 10 for name, content in headers or ())


@record
class Delivery:
    """What became of one record. With an error, partition and offset may be -1. Times in ms since the epoch.

    `timestamp_ms` is the broker's on topics with LogAppendTime, else the producer's.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    error: PenstockError | None = None


@dataclass(slots=True, eq=False)
class _Record:
    """A record without a report."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers | None
    partition: int | None
    timestamp_ms: int | None
    on_delivery: Callable[[Delivery], None] | None
    size_bytes: int
    give_up_at: float


class Transport:
    """A thread-safe producer: acks=all, idempotent, Java's partitioner. Callbacks run on its poll thread.

    `delivery_timeout_s` bounds how long a record may wait for its acknowledgement: after it the delivery carries
    BrokerUnavailable (the record may still be on the topic; sending it again with the same id is safe by the fold).
    After a fatal error the poll thread makes a new producer, and sends every record without a report again, in the
    order of `send`; records that are sent meanwhile follow them. Raises InvalidRequest for settings that librdkafka
    does not take.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        delivery_timeout_s: float = 30.0,
        queue_max_messages: int = 100_000,
    ) -> None:
        self._max_record_bytes = settings.max_record_bytes
        self._delivery_timeout_s = delivery_timeout_s
        self._max_records = queue_max_messages
        self._config = {
            **settings.librdkafka(),
            "enable.idempotence": True,
            "acks": "all",
            "partitioner": "murmur2_random",
            "linger.ms": 0,
            "compression.type": "none",
            "message.max.bytes": settings.max_record_bytes + _RECORD_OVERHEAD_BYTES,
            "delivery.timeout.ms": round(delivery_timeout_s * 1000),
            # What was in flight when a connection died is tried again soon.
            "request.timeout.ms": min(10_000, round(delivery_timeout_s * 1000)),
            "queue.buffering.max.messages": queue_max_messages,
            "queue.buffering.max.kbytes": QUEUE_KIB,
            # A missing topic is an error after two seconds: topics are created before they are used.
            "topic.metadata.propagation.max.ms": 2000,
        }
        del self._config["allow.auto.create.topics"]  # a consumer's property
        self._lock = threading.Lock()
        self._records: dict[_Record, None] = {}
        """Records without a report, in the order of `send`."""
        self._bytes = 0
        self._unsent: deque[_Record] = deque()
        """Those of them that the present producer does not have yet."""
        self._parked = False
        self._wake = threading.Event()
        self._producer = self._new_producer()
        self._failed = False
        """The present producer has had a fatal error: it sends nothing more."""
        self._replace_at = 0.0
        self._closing = False
        self._ended = False
        self._forks = forks()
        keep_in_children(self)
        self._thread = threading.Thread(target=self._poll_forever, name="penstock-transport", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Records without a report."""
        return len(self._records)

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        on_delivery: Callable[[Delivery], None] | None = None,
    ) -> None:
        """Queue one record; returns at once. `on_delivery` then runs exactly once, unless this raises.

        `timestamp_ms`: the record's time; None: now. Topics with LogAppendTime ignore it.

        Raises TooLarge (naming the limit), Overloaded (the local queue is full), BrokerUnavailable, NotFound, and
        InternalError in a child of the process that made this.
        """
        size_bytes = record_bytes(value, key, headers)
        if size_bytes > self._max_record_bytes:
            raise too_large(topic, size_bytes, self._max_record_bytes)
        if self._forks != forks():
            raise InternalError("this client was made before fork(): make one in each process")
        if self._closing:
            raise BrokerUnavailable("the transport is closed")
        give_up_at = time.monotonic() + self._delivery_timeout_s
        record = _Record(topic, value, key, headers, partition, timestamp_ms, on_delivery, size_bytes, give_up_at)
        with self._lock:
            if len(self._records) >= self._max_records or self._bytes + size_bytes > QUEUE_KIB * 1024:
                raise _queue_full()
            if not (self._failed or self._unsent):
                self._produce(record)
            self._records[record] = None
            self._bytes += size_bytes
        if self._parked:
            self._wake.set()

    def flush(self, timeout_s: float) -> int:
        """Wait until every record has its report; returns how many have none. Blocks."""
        give_up = time.monotonic() + timeout_s
        while (left := len(self._records)) and time.monotonic() < give_up:
            time.sleep(0.002)
        return left

    def close(self, timeout_s: float = 10.0) -> int:
        """Take nothing more, flush, end the poll thread. Returns how many were reported as undelivered."""
        if self._closing or self._forks != forks():
            return 0
        self._closing = True
        left = self.flush(timeout_s)
        self._ended = True
        self._wake.set()
        self._thread.join()
        return left

    def _new_producer(self) -> Producer:
        try:
            return Producer({**self._config, "error_cb": self._on_error}, logger=client_logger)
        except KafkaException as error:
            raise wrong_configuration(error) from error

    def _produce(self, record: _Record) -> None:
        """Give it to the present producer, under the lock. Raises as `send`; a fatal error only marks the producer."""
        try:
            self._producer.produce(
                record.topic,
                record.value,
                record.key,
                -1 if record.partition is None else record.partition,
                partial(self._delivered, record),
                timestamp=record.timestamp_ms or 0,
                headers=list(record.headers) if record.headers else None,  # pyright: ignore[reportArgumentType]
            )
        except BufferError as error:
            raise _queue_full() from error
        except KafkaException as error:
            cause = error.args[0]
            if _is_fatal(cause):
                self._failed = True
            elif cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise too_large(record.topic, record.size_bytes, self._max_record_bytes) from error
            else:
                raise from_kafka(error, f"produce to {record.topic}", record.topic, operation="WRITE") from error

    # -- on the poll thread

    def _on_error(self, error: KafkaError) -> None:
        if _is_fatal(error):
            logger.error("transport.fatal error=%s", error)
            self._failed = True
        else:
            logger.debug("transport.error error=%s", error)

    def _delivered(self, record: _Record, error: KafkaError | None, message: Message) -> None:
        delivery = _delivery(record.topic, error, message)
        if self._failed and error is not None and not isinstance(delivery.error, (TooLarge, NotFound, Forbidden)):
            return  # the next producer gets it
        self._report(record, delivery)

    def _report(self, record: _Record, delivery: Delivery) -> None:
        with self._lock:
            if record not in self._records:
                return
            del self._records[record]
            self._bytes -= record.size_bytes
        if record.on_delivery is not None:
            record.on_delivery(delivery)

    def _refuse(self, record: _Record, error: PenstockError) -> None:
        self._report(record, Delivery(topic=record.topic, partition=-1, offset=-1, timestamp_ms=-1, error=error))

    def _poll_forever(self) -> None:
        used_at = time.monotonic()
        while not self._ended:
            wait_s = 0.1
            if self._records:
                used_at = time.monotonic()
            elif time.monotonic() - used_at > PARK_AFTER_S:
                self._park()
                wait_s = 0.0
            try:
                if self._failed and time.monotonic() >= self._replace_at:
                    self._replace()
                if self._unsent:
                    self._send_unsent()
                    wait_s = 0.001
                self._producer.poll(wait_s)
            except Exception:  # a callback's exception comes out here and must not end the thread
                logger.exception("transport.callback_failed")
        self._producer.purge()
        for one in list(self._records):
            try:
                self._refuse(one, BrokerUnavailable(f"produce to {one.topic}: the transport was closed"))
            except Exception:
                logger.exception("transport.callback_failed")

    def _replace(self) -> None:
        """After a fatal error: a new producer gets, in their order, all records that the old one has not delivered."""
        self._replace_at = time.monotonic() + REPLACE_S
        old = self._producer  # its end can take a moment: it must not come under the lock
        old.purge()
        give_up = time.monotonic() + PURGE_S
        while len(old) and time.monotonic() < give_up:
            old.poll(0.05)
        new = self._new_producer()
        with self._lock:
            self._producer, self._failed = new, False
            self._unsent = deque(self._records)
        logger.error("transport.replaced resent=%d", len(self._unsent))

    def _send_unsent(self) -> None:
        for _ in range(RESENT_AT_ONCE):
            with self._lock:
                if self._failed or not self._unsent:
                    return
                record, failure = self._unsent[0], None
                try:
                    if time.monotonic() >= record.give_up_at:
                        failure = BrokerUnavailable(f"produce to {record.topic}: not delivered in time")
                    else:
                        self._produce(record)
                except Overloaded:
                    return
                except PenstockError as error:
                    failure = error
                self._unsent.popleft()
            if failure is not None:
                self._refuse(record, failure)

    def _park(self) -> None:
        """Wait for something to send, or `PARKED_S`."""
        self._wake.clear()
        self._parked = True  # who sends or closes from here on sets the event
        if not (self._records or self._ended):
            self._wake.wait(PARKED_S)
        self._parked = False


def _queue_full() -> Overloaded:
    return Overloaded("the local queue to Kafka is full", retry_after_s=1.0)


def _is_fatal(error: KafkaError) -> bool:
    return error.code() == KafkaError._FATAL or error.fatal()  # pyright: ignore[reportPrivateUsage]


def _delivery(topic: str, error: KafkaError | None, message: Message) -> Delivery:
    offset = message.offset()
    partition = message.partition()
    return Delivery(
        topic=topic,
        partition=-1 if partition is None else partition,
        offset=-1 if offset is None or error is not None else offset,
        timestamp_ms=message.timestamp()[1],
        error=None if error is None else from_kafka(error, f"produce to {topic}", topic, operation="WRITE"),
    )


def _set_unless_done(told: asyncio.Future[Delivery], delivery: Delivery) -> None:
    if not told.done():  # the waiter may have been cancelled
        told.set_result(delivery)


class AsyncTransport:
    """A transport whose outcomes arrive on an event loop. It owns nothing: close the transport itself."""

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.transport = transport
        self._loop = loop or asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._ready: list[tuple[Callable[[Delivery], None], Delivery]] = []
        self._scheduled = False

    async def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Delivery:
        """Send and wait for the broker's acknowledgement. Raises the delivery's error, and what `send` raises."""
        delivered: asyncio.Future[Delivery] = self._loop.create_future()

        self.produce_nowait(
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            callback=partial(_set_unless_done, delivered),
        )
        delivery = await delivered
        if delivery.error is not None:
            raise delivery.error
        return delivery

    async def produce_all(self, records: Sequence[Outgoing]) -> list[Delivery]:
        """Send these in their order, up to the first that `send` refuses, and wait for all acknowledgements.

        The last delivery is then that of the refused record: those behind it have none, and were not sent. A record
        that fails after it was sent does not hold back the others.
        """
        deliveries: list[asyncio.Future[Delivery]] = []
        for one in records:
            deliveries.append(told := self._loop.create_future())
            try:
                self.produce_nowait(
                    one.topic, one.value, key=one.key, headers=one.headers, callback=partial(_set_unless_done, told)
                )
            except PenstockError as error:
                told.set_result(Delivery(topic=one.topic, partition=-1, offset=-1, timestamp_ms=-1, error=error))
                break
        return await asyncio.gather(*deliveries)

    def produce_nowait(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
        callback: Callable[[Delivery], None] | None = None,
    ) -> None:
        """Send; `callback` runs on the event loop with the outcome. Raises as `Transport.send`."""
        on_delivery = None if callback is None else self._handing_over(callback)
        self.transport.send(
            topic,
            value,
            key=key,
            headers=headers,
            partition=partition,
            timestamp_ms=timestamp_ms,
            on_delivery=on_delivery,
        )

    def _handing_over(self, callback: Callable[[Delivery], None]) -> Callable[[Delivery], None]:
        def on_delivery(delivery: Delivery) -> None:  # on the poll thread
            with self._lock:
                self._ready.append((callback, delivery))
                if self._scheduled:
                    return
                self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._run_ready)
            except RuntimeError:
                logger.debug("transport.loop_closed")

        return on_delivery

    def _run_ready(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
            self._scheduled = False
        for callback, delivery in ready:
            try:
                callback(delivery)
            except Exception as error:  # the others still run
                report_fault(f"transport.callback_failed topic={delivery.topic}", error)
