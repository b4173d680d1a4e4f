"""Who asks for webhooks while the broker is slow keeps nobody waiting but itself."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

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


@pytest.fixture
def let_go() -> threading.Event:
    return threading.Event()


async def asked(threads: Threads, asking: list[asyncio.Task[Any]], began: list[str], let_go: threading.Event) -> None:
    await wait_until_async(lambda: len(began) == 2)
    assert await asyncio.wait_for(threads.lists.run(lambda: "a page"), 2) == "a page"
    let_go.set()
    await asyncio.gather(*asking)
    threads.close()


async def test_deliveries_that_wait_for_kafka_hold_up_no_list(
    monkeypatch: pytest.MonkeyPatch, let_go: threading.Event
) -> None:
    began: list[str] = []

    def slow(*_: Any) -> None:
        began.append("t")
        let_go.wait(30)

    class Found:
        async def find(self, tenant: str, request_id: str) -> Any:
            return SimpleNamespace()

        async def message(self, entry: Any) -> Any:
            return SimpleNamespace(partition=0, timestamp_ms=1, headers=((HEADER_CALLBACK, b"http://h/"),))

    monkeypatch.setattr(deliveries, "read_delivery", slow)
    found: Any = Found()
    threads = Threads()
    lookups = DeliveryLookups(found, found, KafkaSettings(), default_codec(), threads)
    asking = [asyncio.create_task(lookups.of_request("t", "r")) for _ in range(6)]
    await asked(threads, asking, began, let_go)


async def test_dead_letters_that_wait_for_kafka_hold_up_no_list(let_go: threading.Event) -> None:
    began: list[str] = []

    def slow(_: float) -> None:
        began.append("t")
        let_go.wait(30)

    letters: Any = SimpleNamespace(index=SimpleNamespace(page=lambda *_, **__: []), catch_up=slow)
    unused: Any = None
    threads = Threads()
    redriving = Redriving(letters, unused, unused, unused, default_codec(), KafkaSettings(), threads)
    asking = [asyncio.create_task(redriving.forget(Caller(tenant="t"), "r")) for _ in range(6)]
    await asked(threads, asking, began, let_go)
