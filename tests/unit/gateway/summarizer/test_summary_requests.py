"""The clients through which the summarizer sends its requests: kept for the next, but not of every tenant for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer import requests as module
from penstock.gateway.summarizer.desk import Key, Submit
from penstock.gateway.summarizer.requests import MOST_IDLE, Requests
from penstock.gateway.summarizer.settings import SummarizerSection
from penstock.producers import Result
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.records import ResultEvent


class Clients:
    """In the place of `AsyncClient`: those that are open, by tenant. A request ends when its tenant may."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.made: list[str] = []
        self.held: dict[str, asyncio.Event] = {}
        self.unclosable: set[str] = set()

    def make(self, _: KafkaSettings, *, tenant: str, codec: Any) -> Client:
        self.open.append(tenant)
        self.made.append(tenant)
        return Client(self, tenant)


class Client:
    def __init__(self, clients: Clients, tenant: str) -> None:
        self.clients, self.tenant = clients, tenant

    async def submit(self, **_: Any) -> str:
        assert self.tenant in self.clients.open, "nobody uses a client that is closed"
        return "sent"

    async def follow(self, *_: Any, **__: Any) -> AsyncIterator[Result]:
        if self.tenant in self.clients.held:
            await self.clients.held[self.tenant].wait()
        yield Result(cast(ResultEvent, type("Ended", (), {"status": "completed", "error": None})))

    async def close(self, timeout: float) -> None:
        self.clients.open.remove(self.tenant)
        if self.tenant in self.clients.unclosable:
            raise BrokerUnavailable("not delivered")


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Clients:
    made = Clients()
    monkeypatch.setattr(module, "AsyncClient", made.make)
    return made


def submit(tenant: str) -> Submit:
    key = Key(tenant, "c")
    return Submit(key=key, topic_id="id", through=3, request_id="r", model=None, maybe_sent=False)


def requests() -> Requests:
    return Requests(KafkaSettings(), default_codec(), SummarizerSection(), lambda *_: 7)


async def test_of_many_tenants_the_clients_of_some_are_kept(clients: Clients) -> None:
    made = requests()
    for number in range(3 * MOST_IDLE):
        assert await made.run(submit(f"t{number}")) == ("completed", 7)
        assert len(clients.open) <= MOST_IDLE
    assert clients.open == [f"t{number}" for number in range(2 * MOST_IDLE, 3 * MOST_IDLE)]
    before = len(clients.made)
    await made.run(submit(clients.open[0]))
    assert len(clients.made) == before, "the client of before"
    await made.run(submit("t0"))
    assert f"t{2 * MOST_IDLE}" in clients.open, "it was used after the others"
    clients.unclosable = set(clients.open)
    await made.close()
    assert clients.open == []


async def test_a_client_whose_request_is_under_way_is_not_closed(clients: Clients) -> None:
    made = requests()
    clients.held["slow"] = asyncio.Event()
    slow = [asyncio.create_task(made.run(submit("slow"))) for _ in range(2)]
    while "slow" not in clients.open:
        await asyncio.sleep(0)
    for number in range(2 * MOST_IDLE):
        await made.run(submit(f"t{number}"))
    assert clients.open[0] == "slow"
    slow[0].cancel()
    await asyncio.gather(slow[0], return_exceptions=True)
    for number in range(2 * MOST_IDLE):
        await made.run(submit(f"u{number}"))
    assert clients.open[0] == "slow", "the other one is under way"
    clients.held["slow"].set()
    assert await slow[1] == ("completed", 7)
    for number in range(2 * MOST_IDLE):
        await made.run(submit(f"v{number}"))
    assert "slow" not in clients.open
    await made.close()
