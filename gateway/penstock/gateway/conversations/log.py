"""Reads topics of one partition with a pool of consumers: creating one costs more than reading a page."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from confluent_kafka import Consumer

from penstock.common import admin
from penstock.common.kafka_errors import translated
from penstock.common.reader import RawMessage, make_consumer, read_batches, read_with
from penstock.common.settings import KafkaSettings
from penstock.gateway.conversations.tails import TopicEnd
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError
from penstock.schemas.topics import TP

IDLE = 8
"""The most consumers in the pool; each holds connections and threads."""
USES = 1_000
"""Uses after which a consumer is replaced. librdkafka keeps every topic it was assigned and refreshes its metadata."""
FETCH_BYTES = 128 << 10
"""Fetch size: enough for a page. More would be prefetched in vain; less would slow down the first indexing."""
PATIENCE_S = 3.0
"""Limit for a used consumer. One that lost its broker can stay silent where a new one connects at once."""


class KafkaLog:
    """A `Log` on Kafka. All methods block and are thread-safe."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: list[tuple[Consumer, int]] = []
        """(consumer, number of its uses)"""
        self._closed = False

    def topic_id(self, topic: str) -> str | None:
        return admin.topic_id(self._settings, topic)

    def end(self, topic: str) -> int:
        return admin.end_offsets(self._settings, [(topic, 0)])[topic, 0]

    def newest_times(self, topics: Sequence[str]) -> dict[str, int]:
        return admin.newest_times(self._settings, topics)

    def places(self, topics: Sequence[str]) -> dict[str, TopicEnd]:
        ids = admin.topic_ids(self._settings, topics)
        ends = admin.end_offsets(self._settings, [(topic, 0) for topic in ids])
        return {topic: TopicEnd(topic_id, ends[topic, 0]) for topic, topic_id in ids.items()}

    def back(self, topic: str, end: int, records: int) -> int:
        return max(0, end - records)

    def read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        """Raises BrokerUnavailable at `give_up` (monotonic), NotFound."""
        return self._read({(topic, 0): (begin, end)}, give_up, most)

    def read_many(self, spans: Mapping[str, tuple[int, int]], give_up: float) -> list[RawMessage]:
        """Raises BrokerUnavailable at `give_up` (monotonic), NotFound."""
        return self._read({(topic, 0): span for topic, span in spans.items()}, give_up, None)

    def batches(self, topic: str, begin: int, end: int, give_up: float, most: int) -> Iterator[Sequence[RawMessage]]:
        """One reading, which a failure interrupts: it goes on with another consumer. Raises BrokerUnavailable at
        `give_up` (monotonic), NotFound."""
        while begin < end:
            consumer, uses = self._take()
            patience = give_up if not uses else min(give_up, time.monotonic() + PATIENCE_S)
            try:
                with translated(f"read {topic}", topic):
                    _know(consumer, topic, patience)
                for batch in read_batches(consumer, (topic, 0), begin, end, give_up, most, first_by=patience):
                    begin = batch[-1].offset + 1 if len(batch) == most else end
                    yield batch
                consumer.unassign()
            except BaseException as error:
                consumer.close()
                if uses and isinstance(error, PenstockError) and time.monotonic() < give_up:
                    continue  # its connection or metadata may be stale: try another one
                raise
            self._give_back(consumer, uses + 1)

    def last_records(self, topics: Sequence[str], give_up: float) -> dict[str, RawMessage | None]:
        """Raises BrokerUnavailable at `give_up` (monotonic)."""
        while time.monotonic() < give_up:
            known = admin.partition_counts(self._settings, topics)
            with suppress(NotFound):  # one was deleted since: look which are left
                ends = admin.end_offsets(self._settings, [(topic, 0) for topic in known])
                ranges = {tp: (end - 1, end) for tp, end in ends.items() if end}
                found: dict[str, RawMessage | None] = {topic: None for topic, _ in ranges}
                return found | {one.topic: one for one in (self._read(ranges, give_up, None) if ranges else ())}
        raise BrokerUnavailable("conversations are deleted while they are listed; try again", retry_after_s=1)

    def _read(self, ranges: Mapping[TP, tuple[int, int]], give_up: float, most: int | None) -> list[RawMessage]:
        while True:
            consumer, uses = self._take()
            patience = give_up if not uses else min(give_up, time.monotonic() + PATIENCE_S)
            try:
                found = _read(consumer, ranges, patience, most)
            except BaseException as error:
                consumer.close()
                if uses and isinstance(error, PenstockError) and time.monotonic() < give_up:
                    continue  # its connection or metadata may be stale: try another one
                raise
            self._give_back(consumer, uses + 1)
            return found

    def close(self) -> None:
        """Close the pool. A consumer in use is closed when its read ends."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for consumer, _ in idle:
            consumer.close()

    def _take(self) -> tuple[Consumer, int]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        # A fetch that waits for new records would delay the next read, so it does not wait.
        overrides = {"fetch.message.max.bytes": FETCH_BYTES}
        return make_consumer(self._settings, fetch_wait_ms=1, buffer_kbytes=1_024, overrides=overrides), 0

    def _give_back(self, consumer: Consumer, uses: int) -> None:
        with self._lock:
            if not self._closed and uses < USES and len(self._idle) < IDLE:
                self._idle.append((consumer, uses))
                return
        consumer.close()


def _read(
    consumer: Consumer, ranges: Mapping[TP, tuple[int, int]], give_up: float, most: int | None
) -> list[RawMessage]:
    first = next(iter(ranges))[0]
    with translated(f"read {first}", first):
        _know(consumer, first if len(ranges) == 1 else None, give_up)
        found = read_with(consumer, ranges, give_up, most)
        consumer.unassign()
    return found


def _know(consumer: Consumer, topic: str | None, give_up: float) -> None:
    """Without this, a used consumer looks up the leader of a topic that is new to it only after a second."""
    consumer.list_topics(topic, timeout=max(0.1, give_up - time.monotonic()))
