"""Helpers for tests: wait for a condition with a deadline, make topics, run a server on a thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import BaseServer
from typing import TypeVar

import psutil
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

T = TypeVar("T")
Describe = str | Callable[[], object]
DEAREST_POLL_S = 0.3
GENEROUS_S = 60.0
"""No wait ends earlier without its condition, but for what is promised: a busy machine fails no test."""


def _what(describe: Describe) -> str:
    return describe if isinstance(describe, str) else str(describe())


def wait_until(
    condition: Callable[[], T],
    deadline_s: float = 10.0,
    describe: Describe = "the condition",
    poll_s: float = 0.02,
    *,
    promised: bool = False,
) -> T:
    """Poll `condition` until it is truthy and return its value.

    Raises AssertionError with `describe` after `deadline_s`, or GENEROUS_S if that is longer. `promised`: the deadline
    is what is tested, and is not extended. Use it where the condition comes true later in another, slower way.
    """
    deadline_s = deadline_s if promised else max(deadline_s, GENEROUS_S)
    give_up = time.monotonic() + deadline_s
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        if now > give_up:
            raise AssertionError(f"not within {deadline_s} s: {_what(describe)}")
        # What costs much is looked at less often: it takes the processor from what is waited for.
        time.sleep(max(poll_s, min(2 * (now - began), DEAREST_POLL_S)))


async def wait_until_async(
    condition: Callable[[], T | Awaitable[T]],
    deadline_s: float = 10.0,
    describe: Describe = "the condition",
    poll_s: float = 0.02,
    *,
    promised: bool = False,
) -> T:
    """The same on an event loop; `condition` may be a coroutine function."""
    deadline_s = deadline_s if promised else max(deadline_s, GENEROUS_S)
    give_up = time.monotonic() + deadline_s
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {deadline_s} s: {_what(describe)}")
        await asyncio.sleep(poll_s)


@contextmanager
def in_background(server: BaseServer) -> Iterator[None]:
    """A server of HTTP that answers on a thread of its own."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def alive(process: psutil.Process | int) -> bool:
    """Whether it runs: a zombie does not, and it may end between any two looks."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children_of(process: psutil.Process | int) -> list[psutil.Process]:
    """Those it has now; none when it has ended."""
    try:
        return (psutil.Process(process) if isinstance(process, int) else process).children()
    except psutil.NoSuchProcess:
        return []


def engine_processes(worker: int) -> list[psutil.Process]:
    """What a worker's fork server made: the worker's grandchildren."""
    return [engine for child in children_of(worker) for engine in children_of(child)]


def create_topics(
    bootstrap_servers: str, prefix: str, partitions: int = 4, pool: str | None = None, *, sharded: bool = False
) -> None:
    """Create all fixed topics of Penstock under `prefix`, and the request topics of `pool` when one is named.

    `sharded`: with the one that conversations share.
    """
    from penstock.common.admin import ensure_topics
    from penstock.common.settings import KafkaSettings
    from penstock.schemas.topics import TopicNames, topic_specs

    settings = KafkaSettings(bootstrap_servers=bootstrap_servers, topic_prefix=prefix)
    specs = topic_specs(TopicNames(prefix), partitions=partitions, shared_conversations=sharded)
    if pool is not None:
        specs = [*specs, *topic_specs(TopicNames(prefix), partitions=partitions, pool=pool)]
    ensure_topics(settings, specs)


def delete_topics(bootstrap_servers: str, but: Iterable[str]) -> None:
    """Delete every topic except the broker's own and those whose names begin with one of `but`."""
    kept = ("__", *but)
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    topics = ask_broker(lambda: admin.list_topics(timeout=10)).topics
    if names := [name for name in topics if not name.startswith(kept)]:
        for deleted in admin.delete_topics(names, operation_timeout=30).values():
            deleted.result(60)


def ask_broker(ask: Callable[[], T], deadline_s: float = 60.0) -> T:
    """The broker's answer; asked again while a leader or a coordinator starts, moves or stands still."""
    give_up = time.monotonic() + deadline_s
    while True:
        try:
            return ask()
        except KafkaException as error:
            if time.monotonic() > give_up:
                raise AssertionError(f"no answer of the broker within {deadline_s} s: {error}") from error
            time.sleep(0.2)


def committed_offsets(bootstrap: str, group: str, partitions: Iterable[tuple[str, int]]) -> list[TopicPartition]:
    """What the broker has of a group, asked by a client of its own.

    By a consumer: AdminClient's list_consumer_group_offsets crashes the process (librdkafka 2.16: rd_kafka_cgrp_op
    without a group) when the coordinator answers with an error, as at a restart.
    """
    asked = [TopicPartition(*place) for place in partitions]
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False})
    try:
        return ask_broker(lambda: consumer.committed(asked, 20))
    finally:
        consumer.close()


def partitions_of(consumer: Consumer, topic: str) -> list[int]:
    """The numbers of a topic's partitions."""
    return sorted(ask_broker(lambda: consumer.list_topics(topic, 10).topics[topic].partitions))
