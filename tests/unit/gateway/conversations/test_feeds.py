"""Conversations that are followed: what each follower is told, and what it costs, without Kafka."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import chain, repeat
from typing import Any
from unittest.mock import Mock

import pytest

from conversation_logs import TOPIC, FakeLog, message, reader
from penstock.common.tasks import end_all
from penstock.gateway.conversations import tails
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.tails import TopicEnd
from penstock.gateway.openai.item_events import Position, item_events
from penstock.gateway.service import conversation_feeds as feeds_module
from penstock.gateway.service.conversation_feeds import PAGE_TURNS, Ended, Feeds
from penstock.gateway.threads import Threads
from penstock.gateway.view.hub import Hub, items_subject
from penstock.schemas.errors import BrokerUnavailable, InvalidCursor
from support import wait_until_async

Events = AsyncGenerator[bytes, None]


class World:
    """A conversation, a hub that tells of it, and the feeds of one gateway."""

    def __init__(self, threads: Threads) -> None:
        self.log, self.hub = FakeLog(), Hub()
        self.conversations: Conversations = reader(self.log)
        self.feeds = Feeds(self.conversations, self.hub, threads, look_s=0.05)

    def append(self, *numbers: int, told: bool = True) -> None:
        for number in numbers:
            self.log.write(message(f"r{number}", "in", 0, 1))
        if told:
            self.hub.notify(items_subject("acme", "c"))

    @asynccontextmanager
    async def follower(self, after: str | None = None, keepalive_s: float = 5.0) -> AsyncIterator[Events]:
        place = self.conversations.place("acme", "c")
        begin = Position(place.end) if after is None else Position.after(after, place)
        async with aclosing(item_events(self.feeds, "acme", "c", place, begin, keepalive_s)) as events:
            yield events


@pytest.fixture
async def world(threads: Threads) -> World:
    return World(threads)


def taken(chunk: bytes) -> list[dict[str, Any]]:
    """The events of some bytes, each with its id."""
    found: list[dict[str, Any]] = []
    for block in chunk.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        event = json.loads(fields["data"])
        assert (event["type"], event["cursor"]) == (fields["event"], fields.get("id"))
        found.append(event)
    return found


async def told(events: Events, count: int) -> list[dict[str, Any]]:
    """The next so many events."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            found += taken(await anext(events))
    return found


def offsets(events: list[dict[str, Any]]) -> list[int]:
    return [event["item"]["offset"] for event in events]


async def test_from_now_on_each_item_comes_when_it_is_appended(world: World) -> None:
    world.append(*range(5))
    async with world.follower() as events:
        (following,) = await told(events, 1)
        assert (following["type"], following["cursor"], following["log_id"]) == ("following", "4", "id-0")
        for number in range(5, 8):
            world.append(number)
            (event,) = await told(events, 1)
            assert (event["type"], event["cursor"], event["item"]["id"]) == ("item", str(number), f"msg_{number}")
    assert len(world.feeds) == 0
    assert world.hub.connected == 0


async def test_all_followers_see_the_same_and_it_is_read_once(world: World) -> None:
    world.append(0)
    followers = [world.follower() for _ in range(30)]
    opened = [await one.__aenter__() for one in followers]
    await asyncio.gather(*(told(events, 1) for events in opened))
    waiting = asyncio.gather(*(told(events, 20) for events in opened))
    await wait_until_async(lambda: world.hub.listens(items_subject("acme", "c")))
    before = world.log.records_read
    world.append(*range(1, 21))
    seen = await waiting
    assert [offsets(one) for one in seen] == [list(range(1, 21))] * 30
    assert world.log.records_read - before <= 21 + 20, "indexed once, and read once"
    assert world.hub.connected == 1
    for one in followers:
        await one.__aexit__(None, None, None)


async def test_a_long_conversation_is_not_read_from_its_beginning(world: World) -> None:
    world.append(*range(6_000))
    async with world.follower() as events:
        await told(events, 1)
        world.append(6_000)
        assert offsets(await told(events, 1)) == [6_000]
    async with world.follower(after="5500") as events:
        assert offsets((await told(events, 501))[1:]) == list(range(5_501, 6_001))
    assert world.log.records_read < 3 * tails.BACK_RECORDS + 1_000


@pytest.mark.parametrize("after", ["-1", "6", "2999"])
async def test_one_that_comes_back_is_told_all_that_it_missed(world: World, after: str) -> None:
    world.append(*range(3_000))
    async with world.follower(after=after) as events:
        begin = int(after) + 1
        assert offsets((await told(events, 3_001 - begin))[1:]) == list(range(begin, 3_000))
        world.append(3_000)
        assert offsets(await told(events, 1)) == [3_000]


async def test_a_follower_that_reads_slowly_holds_up_nobody_and_loses_nothing(world: World) -> None:
    world.append(0)
    async with world.follower() as slow, world.follower() as quick:
        await told(slow, 1)
        await told(quick, 1)
        world.append(1)
        await told(slow, 1)
        for begin in range(2, 10 * PAGE_TURNS, PAGE_TURNS):
            numbers = range(begin, begin + PAGE_TURNS)
            world.append(*numbers)
            found = await told(quick, PAGE_TURNS if begin > 2 else PAGE_TURNS + 1)
            assert offsets(found)[-1] == numbers[-1]
        assert offsets(await told(slow, numbers[-1] - 1)) == list(range(2, numbers[-1] + 1))


async def test_a_repeat_by_a_later_epoch_and_what_was_erased_do_not_come(world: World) -> None:
    world.append(0)
    async with world.follower() as events:
        await told(events, 1)
        world.log.write(message("r0", "in", 0, 2))
        world.append(1, told=False)
        world.log.write(message("r1", "in", 0, 1), tombstone=True)
        world.append(2)
        assert offsets(await told(events, 1)) == [4]


async def test_calls_of_tools_are_events_of_their_own_and_a_client_may_come_back_between(world: World) -> None:
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "gate", "arguments": "{}"}} for n in range(3)]
    world.log.write(replace(message("r0", "out", 0, 1), tool_calls=calls))
    async with world.follower(after="-1") as events:
        _, *items = await told(events, 5)
        assert [one["item"]["id"] for one in items] == ["msg_0", "fc_0_0", "fc_0_1", "fc_0_2"]
        assert [one["cursor"] for one in items] == ["0.1", "0.2", "0.3", "0"]
    async with world.follower(after="0.2") as events:
        following, *items = await told(events, 3)
        assert following["cursor"] == "0.2"
        assert [one["item"]["id"] for one in items] == ["fc_0_1", "fc_0_2"]


async def test_what_nobody_tells_of_is_found_by_a_look(world: World) -> None:
    async with world.follower(keepalive_s=0.01) as events:
        await told(events, 1)
        assert await anext(events) == b": waiting\n\n"
    looking = asyncio.create_task(world.feeds.run())
    async with world.follower() as events:
        await told(events, 1)
        world.append(0, told=False)
        assert offsets(await told(events, 1)) == [0]
    looking.cancel()


@pytest.mark.parametrize("made_anew", [False, True])
async def test_a_deletion_ends_it(world: World, made_anew: bool) -> None:
    world.append(0)
    async with world.follower() as events:
        await told(events, 1)
        if made_anew:
            world.log.make_anew()
        else:
            del world.log.ids[TOPIC]
        world.hub.notify(items_subject("acme", "c"))
        (event,) = await told(events, 1)
        assert event["type"] == "deleted"
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_a_broker_that_is_away_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds_module, "AGAIN_S", 0.01)
    away = Mock(side_effect=chain([BrokerUnavailable("away")] * 3, repeat(None)))
    async with world.follower() as events:
        await told(events, 1)
        world.log.before_read = away
        world.append(0)
        assert offsets(await told(events, 1)) == [0]
    assert away.call_count > 3


async def test_a_log_that_lost_records_ends_the_stream_so_that_clients_ask_again(world: World) -> None:
    world.append(*range(5))
    place = world.conversations.place("acme", "c")
    async with world.feeds.following("acme", "c", place) as feed:
        world.log.ends[TOPIC] = 2
        del world.log.logs[TOPIC][2:]
        feed.wake()
        await wait_until_async(lambda: feed.ended is Ended.BROKEN)


@pytest.mark.parametrize("event_id", ["5", "x", "-2", "1.x", "", "99999999999999999999"])
def test_an_event_that_cannot_be_is_refused(event_id: str) -> None:
    with pytest.raises(InvalidCursor):
        Position.after(event_id, TopicEnd("id", 5))


async def test_a_look_that_waited_for_kafka_is_soon_followed_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds_module, "LONGEST_PAUSE_S", 0.05)
    looks: list[float] = []

    def moved(seen: object) -> list[tuple[str, str]]:
        looks.append(time.monotonic())
        if len(looks) == 1:
            time.sleep(0.5)
        if len(looks) == 2:
            raise RuntimeError("no failure of one look ends them all")
        return []

    monkeypatch.setattr(world.conversations, "moved", moved)
    running = asyncio.create_task(world.feeds.run())
    async with world.follower() as events:
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await wait_until_async(lambda: len(looks) >= 4, 3, lambda: f"looked at {looks}", promised=True)
        await end_all([waiting, running])
