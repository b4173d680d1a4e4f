"""The one way out to Kafka: an idempotent producer, a bounded local queue, and the outcome of every record told.

`Transport` tells outcomes on its poll thread; `AsyncTransport` tells them on an event loop, one hop per batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.common.forking import forks, keep_in_children
from penstock.common.kafka_errors import client_logger, from_kafka, too_large, wrong_configuration
from penstock.common.outgoing import Outgoing
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable, InternalError, Overloaded, PenstockError
from penstock.schemas.records import record

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes | None]]

PARK_AFTER_S = 1.0
PARKED_S = 1.0
"""A producer that has had nothing to do for so long is asked only so often for what it has to tell of itself."""
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


class Transport:
    """A thread-safe producer: acks=all, idempotent, Java's partitioner. Callbacks run on its poll thread.

    `delivery_timeout_s` bounds how long a record may wait for its acknowledgement: after it the delivery carries
    BrokerUnavailable (the record may still be on the topic; sending it again with the same id is safe by the fold).
    Raises InvalidRequest for settings that librdkafka does not take.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        delivery_timeout_s: float = 30.0,
        queue_max_messages: int = 100_000,
    ) -> None:
        self._max_record_bytes = settings.max_record_bytes
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
            "queue.buffering.max.kbytes": 64 * 1024,
            # A missing topic is an error after two seconds: topics are created before they are used.
            "topic.metadata.propagation.max.ms": 2000,
        }
        del self._config["allow.auto.create.topics"]  # a consumer's property
        self._lock = threading.Lock()
        self._outstanding = 0
        self._parked = False
        self._wake = threading.Event()
        self._producer = self._new_producer()
        self._fatal: PenstockError | None = None
        self._closing = False
        self._ended = False
        self._forks = forks()
        keep_in_children(self)
        self._thread = threading.Thread(target=self._poll_forever, name="penstock-transport", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Records whose outcome was not told yet."""
        return self._outstanding

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
        producer = self._usable()

        def report(error: KafkaError | None, message: Message) -> None:
            self._count(-1)
            if on_delivery is not None:
                on_delivery(_delivery(topic, error, message))

        self._count(1)
        try:
            producer.produce(
                topic,
                value,
                key,
                -1 if partition is None else partition,
                report,
                timestamp=timestamp_ms or 0,
                headers=list(headers) if headers else None,  # pyright: ignore[reportArgumentType]
            )
        except BufferError as error:
            self._count(-1)
            raise Overloaded("the local queue to Kafka is full", retry_after_s=1.0) from error
        except KafkaException as error:
            self._count(-1)
            cause = error.args[0]
            if cause.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                raise too_large(topic, size_bytes, self._max_record_bytes) from error
            raise from_kafka(error, f"produce to {topic}", topic) from error

    def flush(self, timeout_s: float) -> int:
        """Wait until the outcome of every record was told; how many remain."""
        give_up = time.monotonic() + timeout_s
        while (left := self._outstanding) and time.monotonic() < give_up:
            time.sleep(0.002)
        return left

    def close(self, timeout_s: float = 10.0) -> int:
        """Take nothing more, flush, end the poll thread. What remains (the number returned) is told as undelivered."""
        if self._closing or self._forks != forks():
            return 0
        self._closing = True
        left = self.flush(timeout_s)
        if left:
            self._producer.purge()
            self.flush(1.0)
        self._ended = True
        self._wake.set()
        self._thread.join()
        return left

    def _count(self, change: int) -> None:
        with self._lock:
            self._outstanding += change
        if self._parked:
            self._wake.set()

    def _new_producer(self) -> Producer:
        try:
            return Producer({**self._config, "error_cb": self._on_error}, logger=client_logger)
        except KafkaException as error:
            raise wrong_configuration(error) from error

    def _usable(self) -> Producer:
        if self._forks != forks():
            raise InternalError("this client was made before fork(): make one in each process")
        if self._closing:
            raise BrokerUnavailable("the transport is closed")
        if self._fatal is not None:
            self._replace()
        return self._producer

    def _replace(self) -> None:
        """After a fatal error an idempotent producer takes nothing any more: begin with a new one."""
        with self._lock:
            if self._fatal is None:
                return
            old, self._producer, self._fatal = self._producer, self._new_producer(), None
        logger.error("transport.replaced outstanding=%d", self._outstanding)
        old.purge()
        old.flush(1.0)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._FATAL or error.fatal():  # pyright: ignore[reportPrivateUsage]
            logger.error("transport.fatal error=%s", error)
            self._fatal = BrokerUnavailable(f"the producer failed: {error.str()}")
        else:
            logger.debug("transport.error error=%s", error)

    def _poll_forever(self) -> None:
        used_at = time.monotonic()
        while not self._ended:
            wait_s = 0.1
            if self._outstanding:
                used_at = time.monotonic()
            elif time.monotonic() - used_at > PARK_AFTER_S:
                self._park()
                wait_s = 0.0
            try:
                self._producer.poll(wait_s)
            except Exception:  # a callback's exception comes out here and must not end the thread
                logger.exception("transport.callback_failed")

    def _park(self) -> None:
        """Wait for something to send, or `PARKED_S`."""
        self._wake.clear()
        self._parked = True  # who sends or closes from here on sets the event
        if not (self._outstanding or self._ended):
            self._wake.wait(PARKED_S)
        self._parked = False


def _delivery(topic: str, error: KafkaError | None, message: Message) -> Delivery:
    offset = message.offset()
    partition = message.partition()
    return Delivery(
        topic=topic,
        partition=-1 if partition is None else partition,
        offset=-1 if offset is None or error is not None else offset,
        timestamp_ms=message.timestamp()[1],
        error=None if error is None else from_kafka(error, f"produce to {topic}", topic),
    )


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

        def note(delivery: Delivery) -> None:
            if not delivered.done():  # the waiter may have been cancelled
                delivered.set_result(delivery)

        self.produce_nowait(
            topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms, callback=note
        )
        delivery = await delivered
        if delivery.error is not None:
            raise delivery.error
        return delivery

    async def produce_all(self, records: Sequence[Outgoing]) -> list[Delivery]:
        """Send these in their order and wait for all acknowledgements. What `send` raises becomes an error as well."""
        deliveries: dict[int, Delivery] = {}
        all_told: asyncio.Future[None] = self._loop.create_future()

        def note(at: int, delivery: Delivery) -> None:
            deliveries[at] = delivery
            if len(deliveries) == len(records) and not all_told.done():  # the waiter may have been cancelled
                all_told.set_result(None)

        for at, one in enumerate(records):
            told = partial(note, at)
            try:
                self.produce_nowait(one.topic, one.value, key=one.key, headers=one.headers, callback=told)
            except PenstockError as error:
                told(Delivery(topic=one.topic, partition=-1, offset=-1, timestamp_ms=-1, error=error))
        if records:
            await all_told
        return [deliveries[at] for at in range(len(records))]

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
            except Exception:
                logger.exception("transport.callback_failed topic=%s", delivery.topic)
