"""One backlog on one topic: encoded requests, their outcomes by the log's own times, what the worker spent on them."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common import Figures
from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.schemas.codec import default_codec
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import partition_for
from system import Process, System

WARM = 20_000
"""Requests after which Kafka's JVM gives steady figures."""
PAYLOAD = {"prompt": "x" * 200, "max_tokens": 16}

Record = tuple[bytes, bytes]
"""Key and value."""


def encoded_requests(count: int, payload: Any = None, **fields: Any) -> list[Record]:
    """Avro requests keyed by their ids. `payload` may be a sequence with one for each request."""
    codec = default_codec()
    records: list[Record] = []
    for number in range(count):
        mine = payload[number] if isinstance(payload, list) else payload or PAYLOAD
        body = {"task": "text_generation", "payload": mine, **fields}
        request = parse_request(body, request_id=f"bench-{time.time_ns()}-{number}", now_ms=time.time_ns() // 10**6)
        records.append((request.request_id.encode(), codec.encode(request)))
    return records


def produce(bootstrap: str, topic: str, records: Sequence[Record], partitions: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000})
    for key, value in records:
        producer.produce(topic, value, key=key, partition=partition_for(key, partitions))
    assert producer.flush(60) == 0


class Outcomes:
    """Follows a topic from its end on with one light consumer, so that looking costs the measured side little."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "fetch.min.bytes": 1}
        )
        partitions = self._consumer.list_topics(topic, 10).topics[topic].partitions
        ends = [
            TopicPartition(topic, n, self._consumer.get_watermark_offsets(TopicPartition(topic, n), timeout=10)[1])
            for n in partitions
        ]
        self._consumer.assign(ends)

    def times_ms(self, keys: Iterable[bytes], deadline_s: float) -> list[int]:
        """The append times of the first record of each key. AssertionError when some are missing at the deadline."""
        left = set(keys)
        wanted, times, give_up = len(left), list[int](), time.monotonic() + deadline_s
        while left:
            assert time.monotonic() < give_up, f"{len(left)} of {wanted} have no outcome"
            for message in self._consumer.consume(5_000, 0.2):
                key = message.key()
                if message.error() is None and isinstance(key, bytes) and key in left:
                    left.remove(key)
                    times.append(message.timestamp()[1])
        return times

    def close(self) -> None:
        self._consumer.close()


def rate(times_ms: Sequence[int]) -> float:
    """Outcomes per second between the first and the last one."""
    return (len(times_ms) - 1) / max(0.001, (max(times_ms) - min(times_ms)) / 1000)


def cpu_seconds(pid: int, thread: int | None = None) -> float:
    """Processor time of a process, or of one of its threads: the main thread has the process's number."""
    where = Path(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    fields = where.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_backlog(
    found: System,
    worker: Process,
    records: Sequence[Record],
    *,
    keys: Sequence[bytes] = (),
    deadline_s: float = 180,
) -> Figures:
    """The worker's rate over one backlog on medium, and the microseconds of processor that each request cost it.

    `keys`, when given, are the records' keys on the request topic, by turns, in place of the requests' ids.
    """
    topic = found.names.request("text_generation", 5)
    outcomes = Outcomes(found.bootstrap, found.names.result)
    pid = worker.popen.pid
    main, whole = cpu_seconds(pid, pid), cpu_seconds(pid)
    sent = [(keys[n % len(keys)], value) for n, (_, value) in enumerate(records)] if keys else records
    produce(found.bootstrap, topic, sent, len(found.ends([topic])))
    times = outcomes.times_ms((key for key, _ in records), deadline_s)
    count = len(records)
    spent = {"main_us": cpu_seconds(pid, pid) - main, "process_us": cpu_seconds(pid) - whole}
    outcomes.close()
    return {"rate": rate(times), **{name: 1e6 * seconds / count for name, seconds in spent.items()}}


def warm(found: System, worker: Process, count: int, **fields: Any) -> None:
    """Send so many no-op requests through the worker first; nothing of it is measured."""
    if count:
        run_backlog(found, worker, encoded_requests(count, **fields))


def lengths(count: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Payloads that ask for 1 to `longest` tokens, evenly spread."""
    chance = random.Random(seed)
    return [{"prompt": "x", "max_tokens": chance.randint(1, longest)} for _ in range(count)]
