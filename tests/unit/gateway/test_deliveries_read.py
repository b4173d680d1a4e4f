"""A slow broker holds up those who ask for webhooks and dead letters, and no other call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.common.settings import KafkaSettings
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service import deliveries
from penstock.gateway.service.deliveries import DeliveryLookups
from penstock.gateway.service.redriving import Redriving
from penstock.gateway.threads import Threads
from penstock.schemas.codec import default_codec
from penstock.schemas.topics import HEADER_CALLBACK
from support import wait_until_async


class SlowKafka:
    """Two threads wait for it, until `released`."""

    def __init__(self) -> None:
        self.released, self.began = threading.Event(), 0

    def __call__(self, *_: Any) -> None:
        self.began += 1
        self.released.wait(30)

    async def holds_up_no_list(self, threads: Threads, ask: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        asking = [asyncio.create_task(ask()) for _ in range(6)]
        await wait_until_async(lambda: self.began == 2)
        assert await asyncio.wait_for(threads.lists.run(lambda: "a page"), 2) == "a page"
        self.released.set()
        await asyncio.gather(*asking)
        threads.close()


async def test_deliveries_that_wait_for_kafka_hold_up_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: Any) -> Any:
        return SimpleNamespace(partition=0, timestamp_ms=1, headers=((HEADER_CALLBACK, b"http://h/"),))

    kafka, threads = SlowKafka(), Threads()
    monkeypatch.setattr(deliveries, "read_delivery", kafka)
    requests: Any = SimpleNamespace(find=found, message=found)
    lookups = DeliveryLookups(requests, requests, KafkaSettings(), default_codec(), threads)
    await kafka.holds_up_no_list(threads, lambda: lookups.of_request("t", "r"))


async def test_dead_letters_that_wait_for_kafka_hold_up_no_list() -> None:
    kafka, threads, unused = SlowKafka(), Threads(), cast(Any, None)
    letters: Any = SimpleNamespace(index=SimpleNamespace(page=lambda *_, **__: []), catch_up=kafka)
    redriving = Redriving(letters, unused, unused, unused, default_codec(), KafkaSettings(), threads)
    await kafka.holds_up_no_list(threads, lambda: redriving.forget(Caller(tenant="t"), "r"))
