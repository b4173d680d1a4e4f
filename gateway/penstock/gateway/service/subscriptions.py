"""Who follows what: one subscriber's frames as an iterator, and what it can be subscribed to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from penstock.gateway.service.turns import Turns
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.frames import FailureFrame, Frame, ResultFrame, StatusFrame
from penstock.gateway.view.hub import Client, Gone, Hub, Subject
from penstock.gateway.view.view import View
from penstock.schemas.cursor import Cursor
from penstock.schemas.errors import Gone as GoneError
from penstock.schemas.errors import InvalidRequest, NotFound, Overloaded, StreamRestarted
from penstock.schemas.topics import TopicNames

MOST_AWAITING_SNAPSHOT = 50_000
"""Maximum number of requests whose first event one subscriber has not received yet."""


class SlowConsumer(Exception):
    """The subscriber did not read; it was let go."""


class Stopping(Overloaded):
    """The gateway stops; what the subscriber follows continues, and any gateway has the rest."""


def _is_unready(frame: Frame) -> bool:
    return isinstance(frame, ResultFrame) and frame.large is not None


class Subscription:
    """One subscriber's frames as an async iterator. That of a single request ends with its outcome."""

    def __init__(self, hub: Hub, *, single: bool, resumes: bool = True, most_frames: int | None = None) -> None:
        """`resumes`, `most_frames`: as `Hub.connect`."""
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        self._connected: Client | None = None  # the hub of a gateway that stops wakes a client before it is handed out
        self._connected = hub.connect(self._on_news, resumes=resumes, most_frames=most_frames)
        self._hub = hub
        self._single = single
        self.wanted = set[Subject]()
        """Conversations that the subscriber follows, or will once their requests are listed."""
        self._openings: deque[Iterator[Sequence[Frame]]] = deque()
        """What this subscriber gets of requests that were under way before it came, made as it is read."""
        self._on_news()

    def _on_news(self) -> None:
        self._ready.set()
        if self._connected is not None and self._connected.gone is not None:
            self._gone.set()

    @property
    def client(self) -> Client:
        assert self._connected is not None
        return self._connected

    def push(self, frames: Iterable[Frame]) -> None:
        """Frames to be sent before anything that is published from now on."""
        self.client.push_all(frames)

    def push_as_read(self, openings: Iterable[Sequence[Frame]]) -> None:
        """Frames to be sent when this subscriber has read all others: there may be more than its queue takes."""
        self._openings.append(iter(openings))
        self._ready.set()

    def _next_opening(self) -> Sequence[Frame] | None:
        while self._openings:
            if (opening := next(self._openings[0], None)) is not None:
                return opening
            self._openings.popleft()
        return None

    async def gone(self) -> Gone:
        """Wait until this subscriber was let go; why."""
        await self._gone.wait()
        assert self.client.gone is not None
        return self.client.gone

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Frame:
        frame = await self.next_frame()
        if frame is None:
            raise StopAsyncIteration
        return frame

    async def next_frame(self) -> Frame | None:
        """The next frame; None after the last of a single request.

        Raises SlowConsumer, Stopping, and for a single request Gone, BrokerUnavailable or RegistryUnavailable when its
        outcome cannot be read.
        """
        while not (queued := self.client.frames) or _is_unready(queued[0]):
            if queued:
                await cast("ResultFrame", queued[0]).ready()
                continue
            self._check_followed()
            if self.client.gone is not None:
                return None
            if (opening := self._next_opening()) is not None:
                self.push(opening)
                continue
            self._ready.clear()
            await self._ready.wait()
        frame = queued.popleft()
        if self._single and isinstance(frame, ResultFrame | FailureFrame):
            self.close()
            queued.clear()
            if isinstance(frame, FailureFrame):
                raise frame.error
        return frame

    async def take_all(self) -> list[Frame]:
        """All frames that are queued, at least one, ready or not. Raises SlowConsumer, Stopping."""
        while not (queued := self.client.frames):
            self._check_followed()
            self._ready.clear()
            await self._ready.wait()
        frames = list(queued)
        queued.clear()
        return frames

    def _check_followed(self) -> None:
        if self.client.gone is Gone.SLOW:
            raise SlowConsumer
        if self.client.gone is Gone.STOPPING:
            way = "follow on at any other" if self.client.resumes else "send the call again"
            raise Stopping(f"the gateway restarts; {way}", retry_after_s=1)

    def take_nowait(self) -> list[Frame]:
        """All frames that are queued now, up to one that is to be waited for: `next_frame` gives that."""
        frames, queued = list[Frame](), self.client.frames
        if not queued and self.client.gone is None and (opening := self._next_opening()) is not None:
            self.push(opening)
        while queued and not _is_unready(queued[0]) and not isinstance(queued[0], FailureFrame):
            frames.append(queued.popleft())
        return frames

    def close(self) -> None:
        self._hub.drop(self.client, Gone.CLOSED)


@dataclass(eq=False)
class Subscriptions:
    """Subscribes clients of the hub to requests and conversations of one tenant at a time."""

    _view: View
    _follower: Follower
    hub: Hub
    _names: TopicNames
    _turns: Turns
    _waits_unseen: Callable[[Entry], dict[str, Any]] = lambda entry: {}
    """Fields of the status of a request that waits for want of a live worker."""

    def open(self, most_frames: int | None = None) -> Subscription:
        """A subscription to nothing yet, for any number of requests and conversations.

        `most_frames`: as `Hub.connect`.
        """
        return Subscription(self.hub, single=False, most_frames=most_frames)

    def subscribe(
        self, tenant: str, request_id: str, after: Cursor | None = None, *, resumes: bool = True
    ) -> Subscription:
        """Frames of one request that the view knows (just submitted, or found), to its outcome.

        Raises NotFound, Gone, InvalidCursor.
        """
        self._known(tenant, request_id).check_cursor(after)
        subscription = Subscription(self.hub, single=True, resumes=resumes)
        self.follow(subscription, tenant, request_id, after)
        return subscription

    def follow(self, subscription: Subscription, tenant: str, request_id: str, after: Cursor | None = None) -> None:
        """Add a known request to a subscription. Raises NotFound, Gone."""
        entry = self._known(tenant, request_id)
        entry.check_cursor(after)
        client = subscription.client
        client.awaiting_snapshot.pop(request_id, None)
        self.hub.subscribe(client, ("request", tenant, request_id))
        if self._view.streams.follow(entry):
            subscription.push(self._opening(entry, after))
        else:
            self._view.streams.subscribe_after_load(entry, client, after, self._opening)

    def replay(self, tenant: str, request_id: str, *, resumed: bool) -> Subscription:
        """Frames of one request that the view knows, from the first piece of its text on, each piece as it was written.

        So a count of the pieces gives the same numbers at each gateway. `resumed`: the caller has got some of
        the text before; if the text was begun anew since, `next_frame` raises StreamRestarted. Raises NotFound, Gone.
        """
        entry = self._known(tenant, request_id)
        subscription = Subscription(self.hub, single=True)

        def opening(entry: Entry, _: Cursor | None) -> Sequence[Frame]:
            if resumed and entry.fold.restarts:
                error = StreamRestarted("the text was begun anew since; ask for the whole when it is done")
                return [FailureFrame(request_id=request_id, cursor=None, error=error)]
            return entry.replay()

        self.hub.subscribe(subscription.client, ("request", tenant, request_id))
        if self._view.streams.follow(entry, pieces=True):
            subscription.push(opening(entry, None))
        else:
            self._view.streams.subscribe_after_load(entry, subscription.client, None, opening, pieces=True)
        return subscription

    def await_outcome(self, tenant: str, request_id: str, *, resumes: bool = True) -> Subscription:
        """Only the outcome of a request that the view knows: no other frame is made for it. Raises NotFound, Gone."""
        self._known(tenant, request_id)
        subscription = Subscription(self.hub, single=True, resumes=resumes)
        self.follow_outcome(subscription, tenant, request_id)
        return subscription

    def follow_outcome(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        """Add the outcome of a request that the view knows, and no other frame of it. Raises NotFound, Gone."""
        entry = self._known(tenant, request_id)
        self.hub.subscribe(subscription.client, ("outcome", tenant, request_id))
        if entry.lacks_outcome and not self._view.streams.follow(entry):
            subscription.client.awaiting_snapshot[request_id] = None
            self._view.streams.subscribe_after_load(
                entry, subscription.client, None, lambda whole, _: [whole.outcome_frame()]
            )
        elif entry.done:
            subscription.push([entry.outcome_frame()])

    def unfollow_outcome(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        self.hub.unsubscribe(subscription.client, ("outcome", tenant, request_id))

    def _known(self, tenant: str, request_id: str) -> Entry:
        entry = self._view.find((tenant, request_id))
        if entry is None:
            raise NotFound("there is no such request")
        if entry.erased:
            raise GoneError("this request was erased")
        return entry

    def _opening(self, entry: Entry, after: Cursor | None = None) -> list[Frame]:
        """What a new subscriber gets first, with what only the gateway can know: that no worker is there to run it."""
        frames = entry.opening(after)
        if frames and isinstance(status := frames[0], StatusFrame) and (known := self._waits_unseen(entry)):
            frames[0] = replace(status, **known, _encoded=None)
        return frames

    def follow_new(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        """Add a request that was just submitted. Followers of its conversation have its beginning already."""
        entry = self._view.find((tenant, request_id))
        client = subscription.client
        told = entry is not None and ("conversation", tenant, entry.conversation_id) in client.subjects
        if entry is None or not told or request_id in client.awaiting_snapshot:
            self.follow(subscription, tenant, request_id)
        elif not entry.done:
            self.hub.subscribe(client, ("request", tenant, request_id))

    def unfollow(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        self.hub.unsubscribe(subscription.client, ("request", tenant, request_id))

    async def follow_conversation(self, subscription: Subscription, tenant: str, conversation_id: str) -> None:
        """Add all requests of a conversation: those that are under way, and those to come.

        Raises InvalidRequest when more are under way than a subscriber can get.
        """
        client, subject = subscription.client, ("conversation", tenant, conversation_id)
        subscription.wanted.add(subject)
        ids = await self._turns.ids(tenant, conversation_id)
        if subject not in subscription.wanted:
            return  # it was left meanwhile
        turns = [
            one
            for one in ids
            if ("request", tenant, one) not in client.subjects and one not in client.awaiting_snapshot
        ]
        if len(client.awaiting_snapshot) + len(turns) > MOST_AWAITING_SNAPSHOT:
            raise InvalidRequest(
                f"more than {MOST_AWAITING_SNAPSHOT} requests of this conversation are under way: follow some"
            )
        self.hub.subscribe(client, subject)
        if not turns:
            return
        client.awaiting_snapshot.update((request_id, None) for request_id in turns)
        subscription.push_as_read(self._openings(subscription, tenant, turns))

    def _openings(self, subscription: Subscription, tenant: str, turns: Sequence[str]) -> Iterator[list[Frame]]:
        """The beginning of each request, as it is when it is sent; without what was sent meanwhile."""
        awaiting_snapshot, subjects = subscription.client.awaiting_snapshot, subscription.client.subjects
        for request_id in turns:
            if request_id not in awaiting_snapshot:
                continue
            entry = self._view.find((tenant, request_id))
            if (
                entry is None
                or entry.erased
                or subjects.isdisjoint(entry.subjects)
                or not self._view.is_settled(entry)  # if it has not ended, it is listed once the history is known
            ):
                del awaiting_snapshot[request_id]
            elif self._view.streams.follow(entry):
                del awaiting_snapshot[entry.request_id]
                yield self._opening(entry)
            else:
                self._view.streams.subscribe_after_load(entry, subscription.client, None, self._opening)

    def unfollow_conversation(self, subscription: Subscription, tenant: str, conversation_id: str) -> None:
        subject = ("conversation", tenant, conversation_id)
        subscription.wanted.discard(subject)
        self.hub.unsubscribe(subscription.client, subject)

    def followed(self, tenant: str, request_id: str) -> bool:
        """Whether somebody follows this request here, or waits for its outcome."""
        return any(self.hub.listens((kind, tenant, request_id)) for kind in ("request", "outcome"))

    async def reach(self, after: Cursor | None) -> None:
        """Wait until this gateway's view is as far as the one that gave a cursor out (2 s at most)."""
        if after is None or after.offset < 0:
            return
        await self._follower.reached({(self._names.result, after.partition): after.offset + 1}, 2.0)

    def drain(self) -> None:
        """Let go who can follow on at any other gateway."""
        self.hub.drain()

    def stop(self) -> None:
        """End all waits and streams: their requests continue, and any gateway has the rest."""
        self.hub.drop_all(Gone.STOPPING)
