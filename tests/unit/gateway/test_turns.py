"""The live turns of a conversation: read on a thread in pages, complete while they change, parsed once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import ORIGIN, STATUSES, request, status
from kit.view_gateway import ViewGateway
from penstock.gateway.service import subscriptions as subscriptions_module
from penstock.gateway.service import turns as turns_module
from penstock.gateway.service.moving_turns import moved_turns, rank_of
from penstock.gateway.view import rows
from penstock.gateway.view.entries import Entry
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import InferenceRequest
from support import wait_until_async

LINE = ("default", "c")
COUNT, READ_AT_ONCE = 120, 50
IDS = [f"r{number:03}" for number in range(COUNT)]


class Gateway(ViewGateway):
    """Its turns wait in the file. `reads` has the thread and the rows of each read of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, held_live=0)
        self.reads: list[tuple[str, int]] = []
        self.on_read: Callable[[], object] = lambda: None
        for number, request_id in enumerate(IDS):
            self.accept(request_id, 1_000 + number)
        self.evict_to_disk()
        store: Any = self.store
        live_turns = store.live_turns

        def noted(*args: Any) -> Any:
            found = live_turns(*args)
            self.reads.append((threading.current_thread().name, len(found)))
            self.on_read()
            return found

        store.live_turns = noted

    def accept(self, request_id: str, append_time_ms: int, **fields: Any) -> None:
        origin = replace(ORIGIN, offset=len(request_id), append_time_ms=append_time_ms)
        self.view.accepted(request(request_id, **{"conversation_id": "c", **fields}), origin)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(turns_module, "READ_AT_ONCE", READ_AT_ONCE)
    with Gateway(tmp_path / "view.sqlite") as made:
        assert made.view.known.held_live_count == 0
        yield made


async def ids(gateway: Gateway) -> object:
    return await gateway.turns.ids(*LINE) == IDS


async def follow(gateway: Gateway) -> object:
    subscription = gateway.subscriptions.open()
    await gateway.subscriptions.follow_conversation(subscription, *LINE)
    return list(subscription.client.awaiting_snapshot) == IDS


async def before(gateway: Gateway) -> object:
    asked: InferenceRequest = request("next", conversation_id="c")
    return await gateway.turns.before(asked) == COUNT


async def lives(gateway: Gateway) -> object:
    return await gateway.turns.any_lives(*LINE) and not await gateway.turns.any_lives(*LINE, 999)


@pytest.mark.parametrize("ask", [ids, follow, before, lives])
async def test_turns_are_read_on_threads_a_few_at_a_time(
    gateway: Gateway, ask: Callable[[Gateway], Awaitable[object]]
) -> None:
    rows.counted_of.cache_clear()
    assert await ask(gateway)
    assert gateway.reads
    for thread, count in gateway.reads:
        assert thread.startswith("gateway-lists")
        assert count <= READ_AT_ONCE
    assert rows.counted_of.cache_info().misses <= 1, "all are counted as the same"


async def test_turns_that_change_while_they_are_listed_are_listed(gateway: Gateway) -> None:
    """One with news is in memory again. One that is new stands before what was read, and may not leave memory."""
    loop, done = asyncio.get_running_loop(), threading.Event()

    def change() -> None:
        gateway.read(STATUSES, status("queued", request_id=IDS[-1]))
        gateway.accept("new", 1)
        gateway.evict_to_disk()
        done.set()

    def on_read() -> None:
        gateway.on_read = lambda: None
        loop.call_soon_threadsafe(change)
        assert done.wait(30)

    gateway.on_read = on_read
    assert set(await gateway.turns.ids(*LINE)) == {*IDS, "new"}
    gateway.evict_to_disk()
    assert gateway.view.known.held_live_count == 0, "they may leave it when they are listed"


async def test_a_conversation_that_is_left_while_its_turns_are_listed_is_not_followed(gateway: Gateway) -> None:
    subscription, release = gateway.subscriptions.open(), threading.Event()
    gateway.on_read = lambda: release.wait(30)
    following = asyncio.create_task(gateway.subscriptions.follow_conversation(subscription, *LINE))
    await wait_until_async(lambda: gateway.reads, 30, "the first page is read")
    gateway.subscriptions.unfollow_conversation(subscription, *LINE)
    release.set()
    await asyncio.wait_for(following, 30)
    assert (subscription.client.subjects, subscription.client.awaiting_snapshot) == (set(), {})


async def test_a_subscriber_is_refused_what_it_cannot_be_told(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions_module, "MOST_AWAITING_SNAPSHOT", COUNT - 1)
    subscription = gateway.subscriptions.open()
    with pytest.raises(InvalidRequest):
        await gateway.subscriptions.follow_conversation(subscription, *LINE)
    assert (subscription.client.subjects, subscription.client.awaiting_snapshot) == (set(), {})


async def test_a_turn_behind_some_that_have_ended_is_found(gateway: Gateway) -> None:
    for request_id in IDS[:-1]:
        gateway.view.known.end(gateway.entry(("default", request_id)))
    assert await gateway.turns.any_lives(*LINE)
    assert await gateway.turns.ids(*LINE) == IDS[-1:]


# -- which turns another priority moves


PRIORITY = {"h": 1, "m": 5, "l": 9}


def turn(number: int, priority: int, *, task: str = "text_generation") -> Entry:
    entry = Entry("t", f"r{number}", 0)
    entry.task, entry.conversation_id, entry.priority, entry.accepted_ms = task, "c", priority, 1_000 + number
    entry.origin = replace(ORIGIN, offset=number, append_time_ms=entry.accepted_ms)
    return entry


@pytest.mark.parametrize(
    ("classes", "chosen", "to", "moved"),
    [
        ("lll", "2", "h", ["r0", "r1", "r2"]),
        ("lll", "0", "h", ["r0"]),
        ("mml", "2", "m", ["r2"]),
        ("hml", "2", "h", ["r1", "r2"]),
        ("mmm", "0", "l", ["r2", "r1", "r0"]),
        ("mmm", "2", "l", ["r2"]),
        ("mlm", "0", "l", ["r2", "r0"]),
        ("lmh", "1", "m", []),
        ("lmh", "02", "m", ["r0", "r2"]),
        ("llll", "13", "h", ["r0", "r1", "r2", "r3"]),
    ],
)
def test_which_turns_move(classes: str, chosen: str, to: str, moved: list[str]) -> None:
    turns = [turn(number, PRIORITY[klass]) for number, klass in enumerate(classes)]
    ids = {f"r{number}" for number in chosen}
    found = moved_turns(turns, lambda one: one.request_id in ids, PRIORITY[to])
    assert [one.request_id for one in found] == moved


def test_running_and_ended_turns_and_summaries_do_not_move() -> None:
    runs, ended, summary, last = turn(0, 9), turn(1, 9), turn(2, 9, task="summarization"), turn(3, 9)
    runs.status = status(request_id="r0")
    ended.ended_as = "completed"
    assert moved_turns([runs, ended, summary, last], lambda one: one is last, 1) == [last]


@given(st.lists(st.integers(0, 12), max_size=8), st.sets(st.integers(0, 7)), st.integers(0, 12))
def test_turns_that_were_in_order_are_in_order_after_each_command(
    priorities: list[int], chosen: set[int], priority: int
) -> None:
    turns = [turn(number, rank) for number, rank in enumerate(sorted(priorities, key=rank_of))]
    picked = {f"r{number}" for number in chosen}
    for one in moved_turns(turns, lambda one: one.request_id in picked, priority):
        one.priority = priority
        ranks = [rank_of(each.priority) for each in turns]
        assert ranks == sorted(ranks)
    assert all(one.priority == priority for one in turns if one.request_id in picked)
