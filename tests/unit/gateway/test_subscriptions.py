"""The frames of one subscriber."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kit.records import NAMES, RESULTS, STATUSES, outcome, request, status
from kit.view_gateway import ViewGateway
from penstock.gateway.service.subscriptions import Stopping, Subscription, Subscriptions
from penstock.gateway.service.turns import Turns
from penstock.gateway.view.frames import ResultFrame
from penstock.gateway.view.hub import Gone, Hub
from penstock.schemas.cursor import Cursor
from penstock.schemas.errors import InvalidCursor, NotFound

R = ("default", "r")
C = ("default", "c")


@pytest.fixture
def gateway(view_gateway: ViewGateway) -> ViewGateway:
    """With one request."""
    view_gateway.view.accepted(request())
    return view_gateway


async def test_a_subscriber_that_comes_while_the_gateway_stops_is_refused() -> None:
    hub = Hub()
    hub.drop_all(Gone.STOPPING)
    late = Subscription(hub, single=True)
    assert await asyncio.wait_for(late.gone(), 5) is Gone.STOPPING
    with pytest.raises(Stopping):
        await asyncio.wait_for(late.next_frame(), 5)
    late.close()
    assert hub.connected == 0


async def test_a_drain_keeps_clients_that_cannot_resume_at_another_gateway(gateway: ViewGateway) -> None:
    native = gateway.subscriptions.subscribe(*R)
    openai = gateway.subscriptions.await_outcome(*R, resumes=False)
    gateway.subscriptions.drain()
    late = [gateway.subscriptions.await_outcome(*R, resumes=resumes) for resumes in (True, False)]
    assert [one.client.gone for one in (native, openai, *late)] == [Gone.STOPPING, None, Gone.STOPPING, None]
    gateway.subscriptions.stop()
    assert {one.client.gone for one in (openai, *late)} == {Gone.STOPPING}
    with pytest.raises(Stopping, match="send the call again"):
        await asyncio.wait_for(openai.next_frame(), 5)


async def test_a_refused_subscription_leaves_no_client(gateway: ViewGateway) -> None:
    subscriptions = gateway.subscriptions
    gateway.read(STATUSES, status())
    foreign = Cursor(partition=7_000, offset=1, epoch=1, attempt=1, text_length=0)
    for call, error in (
        (lambda: subscriptions.subscribe("default", "unknown"), NotFound),
        (lambda: subscriptions.subscribe(*R, foreign), InvalidCursor),
        (lambda: subscriptions.await_outcome("default", "unknown"), NotFound),
        (lambda: subscriptions.replay("default", "unknown", resumed=False), NotFound),
    ):
        with pytest.raises(error):
            call()
        assert gateway.hub.connected == 0


async def test_one_subscription_gets_the_outcomes_of_many(gateway: ViewGateway) -> None:
    outcomes = gateway.subscriptions.open(most_frames=1_000)
    gateway.subscriptions.follow_outcome(outcomes, *R)
    waiting = asyncio.create_task(outcomes.take_all())
    await asyncio.sleep(0)
    gateway.read(STATUSES, status())
    gateway.read(RESULTS, outcome())
    (frame,) = await asyncio.wait_for(waiting, 5)
    assert isinstance(frame, ResultFrame)
    assert (frame.request_id, frame.status, frame.cursor) == ("r", "completed", None)
    gateway.subscriptions.unfollow_outcome(outcomes, *R)
    assert gateway.hub.subjects() == 0
    for _ in range(300):  # more than the default queue of a client holds
        gateway.subscriptions.follow_outcome(outcomes, *R)
    assert len(await outcomes.take_all()) == 300
    with pytest.raises(NotFound):
        gateway.subscriptions.follow_outcome(outcomes, "default", "unknown")
    gateway.subscriptions.drain()
    with pytest.raises(Stopping):
        await asyncio.wait_for(outcomes.take_all(), 5)


@pytest.mark.parametrize("method", ["subscribe", "await_outcome"])
def test_a_request_is_followed_while_anybody_reads_it(gateway: ViewGateway, method: str) -> None:
    follow = getattr(gateway.subscriptions, method)
    assert not gateway.subscriptions.followed(*R)
    reader = follow(*R)
    assert gateway.subscriptions.followed(*R)
    reader.close()
    assert not gateway.subscriptions.followed(*R)
    assert gateway.hub.connected == 0


# -- conversations

IDS = [f"r{number}" for number in range(1_500)]


@pytest.fixture
def turns(gateway: ViewGateway) -> ViewGateway:
    """A conversation with more live turns than a client's queue has room for."""
    gateway.hub = Hub(client_frames=16)
    gateway.view = type(gateway.view)(gateway.store, gateway.hub, NAMES, 1)
    gateway.turns = Turns(gateway.view, gateway.threads)
    gateway.subscriptions = Subscriptions(gateway.view, None, gateway.hub, NAMES, gateway.turns)  # type: ignore[arg-type]
    for request_id in IDS:
        gateway.view.accepted(request(request_id, conversation_id="c"))
    return gateway


@pytest.fixture
async def subscription(turns: ViewGateway) -> Subscription:
    """Follows the conversation."""
    subscription = turns.subscriptions.open()
    await turns.subscriptions.follow_conversation(subscription, *C)
    return subscription


async def read_all(subscription: Subscription) -> list[tuple[str, str]]:
    """(request, type of the frame) of all that is there now."""
    read: list[tuple[str, str]] = []
    with contextlib.suppress(TimeoutError):
        while True:
            frame = await asyncio.wait_for(subscription.next_frame(), 0.2)
            read.append((frame.request_id, frame.type))
    return read


async def test_a_conversation_with_more_turns_than_a_queue_holds(
    turns: ViewGateway, subscription: Subscription
) -> None:
    await turns.subscriptions.follow_conversation(subscription, *C)
    assert await read_all(subscription) == [(one, "status") for one in IDS]
    turns.read(STATUSES, status(request_id="r7"))
    assert await read_all(subscription) == [("r7", "status")]


async def test_an_opening_frame_includes_what_happened_before_it_was_read(
    turns: ViewGateway, subscription: Subscription
) -> None:
    last = IDS[-1]
    turns.read(STATUSES, status(request_id=last))
    turns.read(RESULTS, outcome(last))
    turns.subscriptions.follow(subscription, "default", "r5")
    turns.view.accepted(request("new", conversation_id="c"))
    read = await read_all(subscription)
    for request_id, kinds in ((last, ["result"]), ("r5", ["status"]), ("new", ["status"])):
        assert [kind for one, kind in read if one == request_id] == kinds
    assert {one for one, _ in read} == {*IDS, "new"}


async def test_following_a_conversation_again_costs_nothing(
    turns: ViewGateway, subscription: Subscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(subscription, "push_as_read", pushed.append)
        for _ in range(1_000):
            await turns.subscriptions.follow_conversation(subscription, *C)
            await turns.subscriptions.follow_conversation(subscription, "default", "empty")
    assert pushed == []
    for number in range(300_000):
        subscription.push_as_read(iter(()) if number else iter([()]))
    assert len(await read_all(subscription)) == len(IDS)


@pytest.mark.parametrize(("method", "told"), [("follow_new", {"r9"}), ("follow", {"r9"}), (None, set())])
async def test_a_followed_request_is_still_published_when_its_conversation_is_left(
    turns: ViewGateway, subscription: Subscription, method: str | None, told: set[str]
) -> None:
    if method is not None:
        getattr(turns.subscriptions, method)(subscription, "default", "r9")
    turns.subscriptions.unfollow_conversation(subscription, *C)
    turns.read(STATUSES, status(request_id="r9"))
    read = await read_all(subscription)
    assert {one for one, _ in read} == told
    assert len(read) <= 2
