"""One subscriber's frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.common.reader import RawMessage
from penstock.gateway.service.subscriptions import Stopping, Subscription, Subscriptions
from penstock.gateway.view.frames import ResultFrame
from penstock.gateway.view.hub import Gone, Hub
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import NotFound
from penstock.schemas.records import InferenceRequest, Origin, Record, ResultEvent, StatusEvent
from penstock.schemas.topics import TopicNames

NAMES = TopicNames()
REQUEST = InferenceRequest(request_id="r", task="text_generation", text_generation={"prompt": "x"}, created_at=1)
BASE: dict[str, Any] = {
    "request_id": "r",
    "tenant": "default",
    "origin": Origin(topic="t", partition=0, offset=0, append_time_ms=1),
    "attempt": 1,
    "epoch": 1,
    "created_at": 1,
    "worker_id": "w",
}
RUNNING = StatusEvent(status="running", done=False, rank=4, **BASE)
DONE = ResultEvent(
    kind="terminal", status="completed", task="text_generation", text_generation={"text": "word"}, **BASE
)


class Followed:
    """A view with one request, and what subscribes to it."""

    def __init__(self, store: Store) -> None:
        follower: Any = None
        self.hub = Hub()
        self.view = View(store, self.hub, NAMES, 1)
        self.subscriptions = Subscriptions(self.view, follower, self.hub, NAMES)
        self.view.accepted(REQUEST)
        self._offset = 0

    def read(self, topic: str, record: Record) -> None:
        self.view.apply([RawMessage(topic, 0, self._offset, 1, b"r", default_codec().encode(record))])
        self._offset += 1


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[Followed]:
    store = Store(tmp_path / "view.sqlite", "cluster")
    yield Followed(store)
    store.close()


async def test_who_comes_while_the_gateway_stops_is_told_so() -> None:
    """The hub wakes such a client before it has handed it out: that raised, and callers heard 500."""
    hub = Hub()
    hub.drop_all(Gone.STOPPING)
    late = Subscription(hub, single=True)
    assert await asyncio.wait_for(late.gone(), 5) is Gone.STOPPING
    with pytest.raises(Stopping):
        await asyncio.wait_for(late.next_frame(), 5)
    late.close()
    assert hub.connected == 0


async def test_a_drain_spares_who_cannot_follow_on_elsewhere(followed: Followed) -> None:
    native = followed.subscriptions.subscribe("default", "r")
    openai = followed.subscriptions.await_outcome("default", "r", resumes=False)
    followed.subscriptions.drain()
    late = [followed.subscriptions.await_outcome("default", "r", resumes=resumes) for resumes in (True, False)]
    assert [one.client.gone for one in (native, openai, *late)] == [Gone.STOPPING, None, Gone.STOPPING, None]
    followed.subscriptions.stop()
    assert {one.client.gone for one in (openai, *late)} == {Gone.STOPPING}
    with pytest.raises(Stopping, match="send the call again"):
        await asyncio.wait_for(openai.next_frame(), 5)


async def test_who_waits_for_the_outcome_hears_of_that_alone(followed: Followed) -> None:
    early = followed.subscriptions.await_outcome("default", "r")
    follower = followed.subscriptions.subscribe("default", "r")
    followed.read(NAMES.status, RUNNING)
    assert early.take_nowait() == []
    followed.read(NAMES.result, DONE)
    late = followed.subscriptions.await_outcome("default", "r")
    assert [frame.type for frame in follower.take_nowait()] == ["status", "status", "result"]
    for waits in (early, late):
        frame = await asyncio.wait_for(waits.next_frame(), 5)
        assert isinstance(frame, ResultFrame)
        assert frame.result is not None
        assert frame.result["text"] == "word"
        assert await asyncio.wait_for(waits.next_frame(), 5) is None
    assert followed.hub.subjects() == 1, "the follower's own, which was not asked for its last frame"


async def test_one_subscription_takes_the_outcomes_of_many(followed: Followed) -> None:
    """Of those that have ended, and of those that will; its queue has room for all that it follows."""
    outcomes = followed.subscriptions.open(most_frames=1_000)
    followed.subscriptions.follow_outcome(outcomes, "default", "r")
    waiting = asyncio.create_task(outcomes.take_all())
    await asyncio.sleep(0)
    followed.read(NAMES.status, RUNNING)
    followed.read(NAMES.result, DONE)
    (frame,) = await asyncio.wait_for(waiting, 5)
    assert isinstance(frame, ResultFrame)
    assert (frame.request_id, frame.status, frame.cursor) == ("r", "completed", None)
    followed.subscriptions.unfollow_outcome(outcomes, "default", "r")
    assert followed.hub.subjects() == 0
    for _ in range(300):  # more than the queue of a client takes
        followed.subscriptions.follow_outcome(outcomes, "default", "r")
    assert len(await outcomes.take_all()) == 300
    with pytest.raises(NotFound):
        followed.subscriptions.follow_outcome(outcomes, "default", "unknown")
    followed.subscriptions.drain()
    with pytest.raises(Stopping):
        await asyncio.wait_for(outcomes.take_all(), 5)


class Conversation(Followed):
    """A view with more live turns than a client's queue has room for."""

    TURNS = 1_500

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.hub = Hub(client_frames=16)
        self.view = View(store, self.hub, NAMES, 1)
        follower: Any = None
        self.subscriptions = Subscriptions(self.view, follower, self.hub, NAMES)
        self.ids = [f"r{number}" for number in range(self.TURNS)]
        for request_id in self.ids:
            self.view.accepted(replace(REQUEST, request_id=request_id, conversation_id="c"))

    def event(self, record: Record, request_id: str, topic: str) -> None:
        self.read(topic, replace(record, request_id=request_id))

    async def read_all(self, subscription: Subscription) -> list[tuple[str, str]]:
        """(request, type of the frame) of all that is there now."""
        read: list[tuple[str, str]] = []
        with contextlib.suppress(TimeoutError):
            while True:
                frame = await asyncio.wait_for(subscription.next_frame(), 0.2)
                assert frame is not None
                read.append((frame.request_id, frame.type))
        return read


@pytest.fixture
def conversation(tmp_path: Path) -> Iterator[Conversation]:
    store = Store(tmp_path / "turns.sqlite", "cluster")
    yield Conversation(store)
    store.close()


async def test_a_conversation_with_more_turns_than_a_queue_takes_can_be_followed(conversation: Conversation) -> None:
    """Its opening frames alone were too many: such a subscriber was always let go as too slow."""
    subscription = conversation.subscriptions.open()
    conversation.subscriptions.follow_conversation(subscription, "default", "c")
    conversation.subscriptions.follow_conversation(subscription, "default", "c")
    assert await conversation.read_all(subscription) == [(one, "status") for one in conversation.ids]
    conversation.event(RUNNING, "r7", NAMES.status)
    assert await conversation.read_all(subscription) == [("r7", "status")]


async def test_what_happens_to_a_turn_before_its_beginning_was_told_is_in_its_beginning(
    conversation: Conversation,
) -> None:
    subscription = conversation.subscriptions.open()
    conversation.subscriptions.follow_conversation(subscription, "default", "c")
    last = conversation.ids[-1]
    conversation.event(RUNNING, last, NAMES.status)
    conversation.event(DONE, last, NAMES.result)
    conversation.subscriptions.follow(subscription, "default", "r5")
    conversation.view.accepted(replace(REQUEST, request_id="new", conversation_id="c"))
    read = await conversation.read_all(subscription)
    assert [kind for one, kind in read if one == last] == ["result"], "not its running, and its end once"
    assert [kind for one, kind in read if one == "r5"] == ["status"]
    assert [kind for one, kind in read if one == "new"] == ["status"]
    assert {one for one, _ in read} == {*conversation.ids, "new"}


async def test_a_conversation_that_is_followed_again_and_again_takes_nothing(conversation: Conversation) -> None:
    """Each time wrapped the beginnings once more: 280,000 small frames of one client ended the gateway's process."""
    subscription = conversation.subscriptions.open()
    for _ in range(1_000):
        conversation.subscriptions.follow_conversation(subscription, "default", "c")
        conversation.subscriptions.follow_conversation(subscription, "default", "empty")
    assert len(subscription._openings) == 1
    for number in range(300_000):
        subscription.push_as_read(iter(()) if number else iter([()]))
    assert len(await conversation.read_all(subscription)) == conversation.TURNS


async def test_what_is_followed_by_itself_is_told_though_the_conversation_is_left(conversation: Conversation) -> None:
    """Its beginning was still to come, so its outcome was held back, and then never told."""
    for follow in ("submitted", "known"):
        subscription = conversation.subscriptions.open()
        conversation.subscriptions.follow_conversation(subscription, "default", "c")
        if follow == "submitted":
            conversation.subscriptions.follow_new(subscription, "default", "r9")
        else:
            conversation.subscriptions.follow(subscription, "default", "r9")
        conversation.subscriptions.unfollow_conversation(subscription, "default", "c")
        conversation.event(RUNNING, "r9", NAMES.status)
        read = await conversation.read_all(subscription)
        assert {one for one, _ in read} == {"r9"}
        assert len(read) in (1, 2)
        subscription.close()


async def test_who_stops_following_is_told_no_more_beginnings(conversation: Conversation) -> None:
    subscription = conversation.subscriptions.open()
    conversation.subscriptions.follow_conversation(subscription, "default", "c")
    conversation.subscriptions.unfollow_conversation(subscription, "default", "c")
    assert await conversation.read_all(subscription) == []


def test_nobody_waits_for_what_is_not_known(followed: Followed) -> None:
    with pytest.raises(NotFound):
        followed.subscriptions.await_outcome("default", "unknown")
    assert followed.hub.connected == 0


def test_a_request_is_followed_while_anybody_reads_it(followed: Followed) -> None:
    """It was said of none, so that a client that left ended the request under those who still read it."""
    subscriptions = followed.subscriptions
    for subscribe in (subscriptions.subscribe, subscriptions.await_outcome):
        assert not subscriptions.followed("default", "r")
        reader = subscribe("default", "r")
        assert subscriptions.followed("default", "r")
        reader.close()
    assert not subscriptions.followed("default", "r")
