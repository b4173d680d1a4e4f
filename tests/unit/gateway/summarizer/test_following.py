"""The summarizer beside its desk: what it follows and reads, its group, the clients that send its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from kit.gateway_readers import fake_readers
from penstock.common import admin
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.shards.shard_file import ShardFile
from penstock.gateway.summarizer import following, progress
from penstock.gateway.summarizer import requests as module
from penstock.gateway.summarizer.following import Following
from penstock.gateway.summarizer.progress import CommittedPositions
from penstock.gateway.summarizer.requests import MOST_IDLE, Requests
from penstock.gateway.summarizer.settings import SummarizerSection
from penstock.gateway.summarizer.shared_topic import SharedTopic
from penstock.gateway.summarizer.sources import REACHED, ReadingPlace
from penstock.gateway.summarizer.summary_scheduler import Commit, Key, Submit, SummaryScheduler
from penstock.producers import Result
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, Forbidden
from penstock.schemas.records import ResultEvent, SummarizePolicy
from support import wait_until_async

# -- which conversations are followed


KEYS = [Key("t", f"c{number}") for number in range(5)]


class Source:
    """Conversations by their ids, without any records. `compared`: how many each look asked about."""

    def __init__(self) -> None:
        self.current = {key: f"first {key.conversation_id}" for key in KEYS}
        self.begun: list[Key] = []
        self.compared: list[int] = []

    def there(self) -> set[Key]:
        return set(self.current)

    def ids(self, keys: Sequence[Key]) -> dict[Key, str]:
        self.compared.append(len(keys))
        return {key: self.current[key] for key in keys if key in self.current}

    def places(self, keys: Sequence[Key]) -> dict[Key, ReadingPlace]:
        return {key: ReadingPlace(self.current[key], 0, Commit(key, 0), 0) for key in keys}

    def begin(self, begin: Mapping[Key, int]) -> None:
        self.begun += begin

    failure = None

    def forget(self, key: Key) -> None: ...
    def stop(self) -> None: ...


@pytest.mark.parametrize("at_once", [2, 500])
async def test_a_conversation_that_is_made_again_unseen_is_followed_from_its_beginning(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "COMPARED_AT_ONCE", at_once)
    fake_readers(monkeypatch, following, {})
    source, scheduler = Source(), SummaryScheduler(lambda _: SummarizePolicy(every_turns=2), most=8)
    made = Following(KafkaSettings(), cast(Any, None), scheduler, cast(Any, lambda *_: source), 0.001, lambda: None)
    running = asyncio.create_task(made.run())
    await wait_until_async(lambda: sorted(source.begun) == KEYS)
    source.begun.clear()
    source.current[KEYS[3]] = "second"
    await wait_until_async(lambda: source.begun == [KEYS[3]])
    compared = list(source.compared)
    await wait_until_async(lambda: len(source.compared) > len(compared) + 5)
    assert max(compared) <= at_once, "a look stays cheap, however many are followed"
    assert source.begun == [KEYS[3]]
    running.cancel()
    await asyncio.wait([running])


# -- what the summarizer is told of conversations that share a topic


FOLLOWED, OTHER = Key("default", "c"), Key("default", "d")


def test_the_end_is_told_also_where_the_last_record_cannot_be_decoded(tmp_path: Path) -> None:
    with closing(ShardFile(tmp_path / "f", "id", 1)) as file:
        told: list[RawMessage] = []
        copy = SimpleNamespace(file=file, call=lambda action: action(), partitions=1, topic_id="id")
        source = SharedTopic(KafkaSettings(), default_codec(), cast(Any, copy), told.extend)
        records: Sequence[RawMessage] = [
            RawMessage("t", 0, offset, 9, key, b"nobody can read this")
            for offset, key in enumerate((b"c/fork/1", b"d/fork/2", b"c/r/in/0/0"))
        ]
        file.apply(records, {0: 3}, 9)
        source.begin({FOLLOWED: 0})
        assert [one.offset for one in told] == [0, 2]
        told.clear()
        source.mark({FOLLOWED: 7, OTHER: 7, Key("default", "gone"): 7})
        assert [(one.topic, one.offset, one.timestamp_ms) for one in told] == [("conversation.c", 3, 7)]
        assert told[0].headers is REACHED


# -- the group of a summarizer


@pytest.mark.parametrize("is_refused", [False, True])
def test_the_group_is_asked_before_there_is_a_conversation(monkeypatch: pytest.MonkeyPatch, is_refused: bool) -> None:
    groups: list[str] = []

    def describe(wanted: list[str], **_: Any) -> dict[str, Future[None]]:
        groups.extend(wanted)
        answer: Future[None] = Future()
        if is_refused:
            answer.set_exception(KafkaException(KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)))
        else:
            answer.set_result(None)
        return {groups[-1]: answer}

    client = SimpleNamespace(describe_consumer_groups=describe)
    monkeypatch.setattr(admin, "asked", lambda _, ask, timeout_s: ask(client, timeout_s))
    monkeypatch.setattr(admin, "conversation_topics", lambda _: {})
    monkeypatch.setattr(progress, "make_consumer", lambda *_, **__: None)
    asking = CommittedPositions(KafkaSettings(), "summaries")
    if is_refused:
        with pytest.raises(Forbidden, match="needs READ on the group summaries"):
            asking.check()
    else:
        asking.check()
    assert groups == ["summaries"]


# -- the clients through which the summarizer sends its requests


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
