"""Load for tests and benchmarks: requests by the ten thousand, requests at a rate, and the result topic as it grows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.schemas.codec import default_codec
from penstock.schemas.records import ResultEvent
from support import wait_until
from system import Process, System

FAST = {"linger.ms": 20, "queue.buffering.max.messages": 2_000_000, "partitioner": "murmur2_random"}


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def produce_all(system: System, requests: Iterable[dict[str, Any]], *, partition: int | None = None) -> int:
    """JSON requests as fast as librdkafka takes them; how many. All stand in the log when this returns."""
    producer = Producer({"bootstrap.servers": system.bootstrap, **FAST})
    place = {} if partition is None else {"partition": partition}
    count = 0
    for request in requests:
        body = {"task": "text_generation", "payload": {"prompt": "hi"}, **request}
        topic = system.names.request(body["task"], body.get("priority", 5))
        producer.produce(topic, json.dumps(body), key=body["request_id"], **place)
        count += 1
        if count % 1_000 == 0:
            producer.poll(0)
    assert producer.flush(60) == 0
    return count


class Trickle:
    """Requests at a steady rate from a thread of its own, each at its time, however late the others are."""

    def __init__(self, system: System, make: Callable[[int], dict[str, Any]], *, rate: float, count: int) -> None:
        self.ids = [str(make(number)["request_id"]) for number in range(count)]
        self._system, self._make, self._rate, self._count = system, make, rate, count
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        producer = Producer({"bootstrap.servers": self._system.bootstrap, "linger.ms": 0})
        began = time.monotonic()
        for number in range(self._count):
            body = {"task": "text_generation", "payload": {"prompt": "hi"}, **self._make(number)}
            time.sleep(max(0.0, began + number / self._rate - time.monotonic()))
            topic = self._system.names.request(body["task"], body.get("priority", 5))
            producer.produce(topic, json.dumps(body), key=body["request_id"])
            producer.poll(0)
        producer.flush(60)

    def join(self) -> None:
        self._thread.join(self._count / self._rate + 60)
        assert not self._thread.is_alive()


@dataclass
class Follower:
    """All events of the result topic so far, in the log's order within each partition; close it after use."""

    system: System
    events: list[ResultEvent] = field(default_factory=list)
    terminals: dict[str, ResultEvent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._codec = default_codec()
        self._consumer = Consumer(
            {"bootstrap.servers": self.system.bootstrap, "group.id": "follower", "enable.auto.commit": False}
        )
        topic = self.system.names.result
        partitions = self._consumer.list_topics(topic, 10).topics[topic].partitions
        self._consumer.assign([TopicPartition(topic, number, 0) for number in partitions])

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def update(self, wait_s: float = 0.05) -> Follower:
        """Take what has come; `wait_s` is how long nothing must come before this returns."""
        while messages := self._consumer.consume(2_000, wait_s):
            for message in messages:
                if message.error() is None:
                    event = self._codec.decode(message.value() or b"", ResultEvent)
                    self.events.append(event)
                    if event.is_terminal:
                        self.terminals.setdefault(event.request_id, event)
            if len(messages) < 2_000:
                break
        return self

    def wait(self, ids: Iterable[str], deadline_s: float, describe: Callable[[], str] | None = None) -> None:
        wanted = set(ids)

        def left() -> str:
            missing = wanted - set(self.terminals)
            words = describe() if describe is not None else self.system.processes[-1].tail()
            return f"{len(missing)} of {len(wanted)} have no outcome, as {sorted(missing)[:3]}\n{words}"

        wait_until(lambda: wanted <= set(self.update().terminals), deadline_s, left)

    def wait_any(self, ids: Iterable[str], deadline_s: float, describe: Callable[[], str]) -> str:
        """Wait until one of them has an outcome, and return it: which one is first depends on the order of fetches."""
        wanted = set(ids)
        wait_until(lambda: not wanted.isdisjoint(self.update().terminals), deadline_s, describe)
        return next(one for one in self.terminals if one in wanted)

    def latencies_ms(self, ids: Iterable[str]) -> list[float]:
        """From the request's append to its outcome, by the clock that all processes of this machine share."""
        return [self.ended(i) - self.terminals[i].origin.append_time_ms for i in ids]

    def ended(self, request_id: str) -> int:
        return self.terminals[request_id].created_at

    def started(self, request_id: str) -> int:
        """When its run began, in wall-clock milliseconds."""
        event = self.terminals[request_id]
        assert event.timings is not None
        return event.created_at - event.timings.run_ms

    def started_between(self, ids: Iterable[str], begin_ms: float, end_ms: float) -> list[str]:
        return [i for i in ids if i in self.terminals and begin_ms < self.started(i) < end_ms]


def taken_in(worker: Process, at_least: int, deadline_s: float = 120) -> None:
    """Return when the worker holds `at_least` requests, or takes no more for three seconds."""
    seen, since = -1.0, time.monotonic()

    def settled() -> bool:
        nonlocal seen, since
        held = worker.metric("penstock_inflight")
        if held > seen:
            seen, since = held, time.monotonic()
        return seen >= at_least or time.monotonic() - since > 3

    wait_until(settled, deadline_s, lambda: f"{seen} held\n{worker.tail()}", poll_s=0.2)


def rerun_ratio(events: Sequence[ResultEvent], *, killed_at_ms: float, commit_interval_s: float) -> dict[str, float]:
    """After one worker was killed and a second one ended its work: what ran at both ÷ what had to.

    What had to run again is what ran at the kill, and what ended so shortly before it that the group could not have
    it committed: two intervals and 100 ms for the commit's way.
    """
    horizon_ms = killed_at_ms - 2_000 * commit_interval_s - 100
    by_request: dict[str, list[ResultEvent]] = {}
    for event in events:
        by_request.setdefault(event.request_id, []).append(event)
    first = events[0].worker_id
    again = running = recent = 0
    for mine in by_request.values():
        before = [event for event in mine if event.worker_id == first]
        again += bool(before) and len(before) < len(mine)
        ends = [event.created_at for event in before if event.is_terminal]
        running += bool(before) and not ends
        recent += any(end > horizon_ms for end in ends)
    return {"ratio": again / max(1, running + recent), "again": again, "running": running, "recent": recent}


KILL_OPTIONS = {"tokens": 1_000, "delay_ms": 25, "slots": 24}
COMMIT_INTERVAL_S = 0.3


def kill_under_load(system: System, *, finished: int = 2_000, long_tokens: int = 500) -> dict[str, float]:
    """Kill -9 of a worker whose partitions each have a long run at their head and much that is done behind it.

    The system's model is the no-op engine with KILL_OPTIONS. A second worker takes over and ends all of it; what is
    given back is `rerun_ratio`'s.
    """
    first = system.worker("w1").wait_ready()
    heads = [f"head-{number}" for number in range(4)]
    for partition, request_id in enumerate(heads):
        request = {"request_id": request_id, "stream": True, "payload": {"prompt": "x", "max_tokens": long_tokens}}
        produce_all(system, [request], partition=partition)
    short = [f"short-{number}" for number in range(finished + 1_000)]
    produce_all(
        system,
        (
            {"request_id": i, "stream": True, "payload": {"prompt": "x", "max_tokens": 1 + number % 4}}
            for number, i in enumerate(short)
        ),
    )
    with Follower(system) as seen:
        wait_until(lambda: len(seen.update().terminals) >= finished, 60, first.tail)
        assert not set(heads) & set(seen.terminals), "a long run ended before the kill: nothing was held back"
        killed_at_ms = time.time() * 1000
        first.kill9()
        second = system.worker("w2").wait_ready()
        seen.wait([*heads, *short], 120, second.tail)
        system.wait_drained(60)
        seen.update(0.5)
        return rerun_ratio(seen.events, killed_at_ms=killed_at_ms, commit_interval_s=COMMIT_INTERVAL_S)
