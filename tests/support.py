"""Helpers for tests: wait for a condition with a deadline, make topics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
Describe = str | Callable[[], object]


def _what(describe: Describe) -> str:
    return describe if isinstance(describe, str) else str(describe())


def wait_until(
    condition: Callable[[], T], deadline_s: float = 10.0, describe: Describe = "the condition", poll_s: float = 0.02
) -> T:
    """Poll `condition` until it is truthy and return its value; AssertionError with `describe` after `deadline_s`."""
    give_up = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > give_up:
            raise AssertionError(f"not within {deadline_s} s: {_what(describe)}")
        time.sleep(poll_s)
    return value


async def wait_until_async(
    condition: Callable[[], T | Awaitable[T]],
    deadline_s: float = 10.0,
    describe: Describe = "the condition",
    poll_s: float = 0.02,
) -> T:
    """The same on an event loop; `condition` may be a coroutine function."""
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


def create_topics(bootstrap_servers: str, prefix: str, partitions: int = 4, pool: str | None = None) -> None:
    """Create all fixed topics of Penstock under `prefix`, and the request topics of `pool` when one is named."""
    from penstock.producers.admin import ensure_topics
    from penstock.producers.settings import KafkaSettings
    from penstock.schemas.topics import TopicNames, topic_specs

    settings = KafkaSettings(bootstrap_servers=bootstrap_servers, topic_prefix=prefix)
    specs = topic_specs(TopicNames(prefix), partitions=partitions)
    if pool is not None:
        specs = [*specs, *topic_specs(TopicNames(prefix), partitions=partitions, pool=pool)]
    ensure_topics(settings, specs)
