"""Conversations that somebody follows here: what is appended is read once for all who follow.

Followers ask when they are ready for more, so that none has a queue. One that stands where the feed stands gets what
the feed has just read; one that is behind reads pages by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import ParamSpec, TypeVar

from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.tails import Part, Tail, TopicEnd
from penstock.gateway.threads import Threads
from penstock.gateway.view.hub import Client, Gone, Hub, items_subject
from penstock.schemas.errors import NotFound, PenstockError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Key = tuple[str, str]
"""(tenant, conversation id)"""

PAGE_TURNS = 50
LOOK_S = 2.0
"""Between two looks at the ends of all followed conversations: they are deleted by other gateways, and others than
workers may write to them. A look that takes long is followed by a longer pause, but not one that waited for Kafka."""
LONGEST_PAUSE_S = 10.0
AGAIN_S = 1.0


class Ended(Enum):
    """Why nothing more comes of a feed."""

    DELETED = auto()
    BROKEN = auto()
    """The gateway stops, or cannot read on: a follower comes again, here or at another gateway."""


class Feed:
    """One conversation that is followed. On the event loop."""

    def __init__(self, key: Key, place: TopicEnd, tail: Tail) -> None:
        self.key = key
        self.topic_id, self.base = place.topic_id, place.base
        self.tail = tail
        self.newest = Part(begin=place.end, end=place.end, turns=())
        self.ended: Ended | None = None
        self.followers = 0
        self.client: Client | None = None
        self.news = asyncio.Event()
        self.changed = asyncio.Event()
        """Set when there is more than when it was looked at; then another takes its place."""

    def wake(self) -> None:
        """Something may have been appended, or the hub let this feed go."""
        if self.client is not None and self.client.gone is not None:
            self.end(Ended.BROKEN)
        self.news.set()

    def publish(self, part: Part) -> None:
        self.newest = part
        self._tell()

    def end(self, why: Ended) -> None:
        if self.ended is None:
            self.ended = why
            self.news.set()
            self._tell()

    def _tell(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class Feeds:
    """A reader for each conversation that is followed here, woken by the view's news of its requests."""

    def __init__(self, conversations: Conversations, hub: Hub, threads: Threads, look_s: float = LOOK_S) -> None:
        self._conversations, self._hub, self._threads, self._look_s = conversations, hub, threads, look_s
        self._feeds: dict[Key, Feed] = {}
        self._reading: dict[Feed, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._feeds)

    @asynccontextmanager
    async def following(self, tenant: str, conversation_id: str, place: TopicEnd) -> AsyncGenerator[Feed]:
        """The feed of a conversation, which stood there a moment ago."""
        feed = self._feed((tenant, conversation_id), place)
        feed.followers += 1
        try:
            yield feed
        finally:
            feed.followers -= 1
            if not feed.followers:
                self._close(feed)

    async def part(self, feed: Feed, begin: int) -> Part:
        """What stands from an offset on, in part. Raises NotFound, BrokerUnavailable, RegistryUnavailable."""
        newest = feed.newest
        if begin >= newest.begin:
            return Part(begin=begin, end=newest.end, turns=[turn for turn in newest.turns if turn.offset >= begin])
        return await self._page(feed, begin, newest.end)

    def wake(self, tenant: str, conversation_id: str) -> None:
        """Look at this conversation now, if it is followed."""
        if (feed := self._feeds.get((tenant, conversation_id))) is not None:
            feed.wake()

    async def run(self) -> None:
        """Look at all of them now and then, until it is cancelled."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(self._look_s, min(10 * took_s, LONGEST_PAUSE_S)))
            began = time.monotonic()
            seen = {key: TopicEnd(feed.topic_id, feed.newest.end, feed.base) for key, feed in self._feeds.items()}
            try:
                moved = await self._threads.metadata.run(self._conversations.moved, seen) if seen else []
            except PenstockError as error:
                logger.warning("feeds.not_looked error=%s", error.code)
                continue
            except Exception:  # its followers would wait for ever
                logger.exception("feeds.not_looked")
                continue
            took_s = time.monotonic() - began
            for key in moved:
                self.wake(*key)

    def _feed(self, key: Key, place: TopicEnd) -> Feed:
        feed = self._feeds.get(key)
        if feed is not None and feed.topic_id != place.topic_id:
            feed.end(Ended.DELETED)
        if feed is None or feed.ended is not None:
            feed = self._feeds[key] = Feed(key, place, self._conversations.tail(*key, place))
            feed.client = self._hub.connect(feed.wake)
            self._hub.subscribe(feed.client, items_subject(*key))
            self._reading[feed] = asyncio.create_task(self._read(feed), name="conversation-feed")
            feed.wake()  # the tail is to be read; or the gateway stops already
        return feed

    def _close(self, feed: Feed) -> None:
        self._reading.pop(feed).cancel()
        if feed.client is not None:
            self._hub.drop(feed.client, Gone.CLOSED)
        if self._feeds.get(feed.key) is feed:
            del self._feeds[feed.key]

    async def _read(self, feed: Feed) -> None:
        while feed.ended is None:
            await feed.news.wait()
            feed.news.clear()
            try:
                await self._advance(feed)
            except NotFound:
                feed.end(Ended.DELETED)
            except PenstockError as error:
                logger.warning("feeds.not_read error=%s", error.code)
                await asyncio.sleep(AGAIN_S)
                feed.news.set()
            except Exception:
                logger.exception("feeds.failed")
                feed.end(Ended.BROKEN)

    async def _advance(self, feed: Feed) -> None:
        """Read to the end as it is now. Raises NotFound, BrokerUnavailable, RegistryUnavailable."""
        end = await self._run(feed, feed.tail.refresh)
        if end < feed.newest.end:  # the log lost records, and positions in it mean nothing any more
            feed.end(Ended.BROKEN)
        while feed.ended is None and feed.newest.end < end:
            feed.publish(await self._page(feed, feed.newest.end, end))

    async def _page(self, feed: Feed, begin: int, end: int) -> Part:
        """The next messages from `begin` on. The conversation ends at `end` or behind it."""
        if (part := await self._run(feed, feed.tail.part, begin, PAGE_TURNS)) is not None:
            return part
        turns = await self._run(feed, self._conversations.turns, *feed.key, PAGE_TURNS, after=begin - 1)
        behind = turns[-1].offset + 1 if turns else begin
        return Part(begin=begin, end=behind if len(turns) == PAGE_TURNS else max(behind, end), turns=turns)

    async def _run(self, feed: Feed, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        return await self._threads.conversations.run_for(feed.key[0], work, *args, **options)
