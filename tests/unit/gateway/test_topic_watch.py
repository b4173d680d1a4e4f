"""The watch over topics: what a request that is not found costs does not grow with the conversations of others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.gateway.limits.tenants import Tenants
from penstock.gateway.threads import Threads
from penstock.gateway.view import topic_watch
from penstock.gateway.view.topic_watch import OLD_S, PAUSES, TopicWatch
from penstock.gateway.view.topics_read import always_read

SETTINGS = KafkaSettings()
NAMES = SETTINGS.names
NEEDED = [*always_read(NAMES), *NAMES.request_topics()]
POOL = NAMES.request("text_generation", 5, "gpu")


class Broker:
    """Has these topics, with a partition each. `asked`: the topics of each look-up; None: all."""

    def __init__(self) -> None:
        self.now, self.look_s = 1_000.0, 0.0
        self.topics = set(NEEDED)
        self.asked: list[list[str] | None] = []

    def partition_counts(
        self, settings: KafkaSettings, topics: Iterable[str] | None = None, timeout_s: float = 10.0
    ) -> dict[str, int]:
        wanted = None if topics is None else list(topics)
        self.asked.append(wanted)
        self.now += self.look_s
        return {topic: 1 for topic in self.topics if wanted is None or topic in wanted}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    made = Broker()
    monkeypatch.setattr(admin, "partition_counts", made.partition_counts)
    monkeypatch.setattr(topic_watch, "time", SimpleNamespace(monotonic=lambda: made.now, time=lambda: made.now))
    return made


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads()
    yield made
    made.close()


def watch_of(tenants: Tenants, threads: Threads, conversations: Any = None) -> TopicWatch:
    read = {(topic, 0): 0 for topic in NEEDED}
    view: Any = SimpleNamespace(tenants=tenants, offsets=lambda: read, result_partitions=[].append)
    return TopicWatch(SETTINGS, view, threads, conversations)


async def test_conversations_are_counted_by_their_own_errand_alone(broker: Broker, threads: Threads) -> None:
    tenants = Tenants()
    broker.topics |= {NAMES.conversation("acme", "c1"), NAMES.conversation("default", "c2")}
    watch = watch_of(tenants, threads)
    await watch.look()
    assert not tenants.known()
    await watch.count_conversations()
    assert {tenant: work.conversations for tenant, work in tenants.known().items()} == {
        "acme": {"c1"},
        "default": {"c2"},
    }
    broker.topics.discard(NAMES.conversation("acme", "c1"))
    await watch.count_conversations()
    assert not tenants.of("acme").conversations


async def test_others_have_their_turn_while_conversations_are_counted(broker: Broker, threads: Threads) -> None:
    """Of any number of conversations the loop takes one set for each tenant; of tenants a few in one go."""
    most, in_one_go = topic_watch.COUNTED_AT_ONCE, [0]

    class Counting(Tenants):
        def on_conversations(self, tenant: str, listed: set[str], now_s: float) -> None:
            in_one_go[-1] += 1
            super().on_conversations(tenant, listed, now_s)

    async def others() -> None:
        while True:
            in_one_go.append(0)
            await asyncio.sleep(0)

    listed = [(f"t{number}", f"c{n}") for number in range(3 * most) for n in range(3)]
    tenants = Counting()
    tenants.on_conversations("gone", {"c"}, 0.0)
    broker.now = 1e6
    task = asyncio.create_task(others())
    await watch_of(tenants, threads, lambda: listed).count_conversations()
    task.cancel()
    assert max(in_one_go) <= most
    assert len(tenants.known()) == 3 * most
    assert tenants.of("t7").conversations == {"c0", "c1", "c2"}


async def test_long_lists_of_topics_are_made_less_often(broker: Broker, threads: Threads) -> None:
    watch = watch_of(Tenants(), threads)
    for look_s, pause_s in ((0.0, OLD_S), (3.0, 3.0 * PAUSES)):
        broker.look_s = look_s
        await watch.look()
        broker.now += pause_s - 0.1
        assert not watch.is_old
        broker.now += 0.2
        assert watch.is_old


async def test_unknown_pools_do_not_have_all_topics_listed(broker: Broker, threads: Threads) -> None:
    watch = watch_of(Tenants(), threads)
    await watch.look()
    broker.asked.clear()
    for _ in range(2):
        assert not await watch.look_for(f"{POOL}x")
    assert broker.asked == [[f"{POOL}x"]], "and what is not there is remembered"
