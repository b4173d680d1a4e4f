"""Threads of a gateway: work that does not end takes the share of one tenant and no more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from kit.refusals import refused
from penstock.common.settings import KafkaSettings
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service import deliveries
from penstock.gateway.service.deliveries import DeliveryLookups
from penstock.gateway.service.redriving import Redriving
from penstock.gateway.threads import Pool, Threads
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import NotFound, PenstockError
from penstock.schemas.topics import HEADER_CALLBACK
from support import wait_until_async


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    pool = Pool("test", threads=4, of_one=2)
    yield pool
    pool.close()


class Slow:
    """Work that waits for the test."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.began = 0

    def __call__(self, *_: Any) -> None:
        self.began += 1
        assert self.may_end.wait(60)


def semaphores() -> int:
    gc.collect()  # those of tests before this one
    return sum(isinstance(one, asyncio.Semaphore) for one in gc.get_objects())


async def ends_soon(pool: Pool, tenant: str) -> bool:
    return await asyncio.wait_for(pool.run_for(tenant, lambda: True), 60)


async def test_slow_work_of_one_tenant_does_not_delay_others(pool: Pool) -> None:
    slow = Slow()
    calls = [asyncio.create_task(pool.run_for("flood", slow)) for _ in range(6)]
    await wait_until_async(lambda: slow.began == 2)
    assert await ends_soon(pool, "other")
    assert slow.began == 2, "its share"
    slow.may_end.set()
    await asyncio.gather(*calls)
    assert slow.began == 6


async def test_a_thread_counts_until_its_work_ends(pool: Pool) -> None:
    """A client that leaves and returns takes no more threads than one that waits."""
    slow, before = Slow(), semaphores()
    for _ in range(10):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pool.run_for("flood", slow), 0.02)
    assert slow.began == 2
    assert await ends_soon(pool, "other")
    slow.may_end.set()
    assert await ends_soon(pool, "flood")
    await wait_until_async(lambda: semaphores() <= before, describe="nothing is kept of a tenant without calls")


async def test_errors_come_without_their_frames(pool: Pool) -> None:
    def fails() -> None:
        try:
            raise OSError("the store")
        except OSError as error:
            raise NotFound("not there") from error

    with refused(PenstockError, __cause__=None):
        await pool.run_for("t", fails)


async def test_a_closed_pool_takes_no_work(pool: Pool) -> None:
    pool.close()
    for _ in range(3):  # and no share is lost by it
        with pytest.raises(RuntimeError):
            await pool.run_for("t", lambda: None)


async def test_a_single_tenant_has_all_threads() -> None:
    threads, slow = Threads(one_tenant=True), Slow()
    calls = [asyncio.create_task(threads.artifacts.run_for("default", slow)) for _ in range(24)]
    await wait_until_async(lambda: slow.began == 24)
    slow.may_end.set()
    await asyncio.gather(*calls)
    threads.close()


# -- a slow broker holds up those who ask for webhooks and dead letters, and no other call


async def holds_up_no_list(threads: Threads, kafka: Slow, ask: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Two threads wait for Kafka."""
    asking = [asyncio.create_task(ask()) for _ in range(6)]
    await wait_until_async(lambda: kafka.began == 2)
    assert await asyncio.wait_for(threads.lists.run(lambda: "a page"), 2) == "a page"
    kafka.may_end.set()
    await asyncio.gather(*asking)


async def test_deliveries_that_wait_for_kafka_hold_up_no_list(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka, found = Slow(), SimpleNamespace(partition=0, timestamp_ms=1, headers=((HEADER_CALLBACK, b"http://h/"),))
    monkeypatch.setattr(deliveries, "read_delivery", kafka)
    requests: Any = Mock(find=AsyncMock(return_value=found), message=AsyncMock(return_value=found))
    lookups = DeliveryLookups(requests, requests, KafkaSettings(), default_codec(), threads)
    await holds_up_no_list(threads, kafka, lambda: lookups.of_request("t", "r"))


async def test_dead_letters_that_wait_for_kafka_hold_up_no_list(threads: Threads) -> None:
    kafka, unused = Slow(), cast(Any, None)
    letters: Any = SimpleNamespace(index=SimpleNamespace(page=lambda *_, **__: []), catch_up=kafka)
    redriving = Redriving(letters, unused, unused, unused, default_codec(), KafkaSettings(), threads)
    await holds_up_no_list(threads, kafka, lambda: redriving.forget(Caller(tenant="t"), "r"))
