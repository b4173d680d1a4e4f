"""Which topics and partitions there are: looked for now and then, and what is new is read, what is gone forgotten."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from penstock.common import admin
from penstock.common.reader import PartitionReader
from penstock.common.settings import KafkaSettings
from penstock.gateway.threads import Threads
from penstock.gateway.view.topics_read import (
    ListConversations,
    UnknownTopics,
    conversations_by_tenant,
    discover,
    partitions_of,
)
from penstock.gateway.view.view import View
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

OLD_S, PAUSES = 1.0, 20
"""How old the list of topics may be when a request is not found: its pool may be newer. A list of very many topics
takes long, and is not made again before so many times as long."""
COUNTED_AT_ONCE = 200
"""Tenants whose conversations are counted in one go."""


class TopicWatch:
    """On the event loop. `begin` comes first; the view's offsets say which partitions are read."""

    def __init__(
        self, settings: KafkaSettings, view: View, threads: Threads, conversations: ListConversations | None = None
    ) -> None:
        self._settings = settings
        self._view = view
        self._threads = threads
        self._conversations = conversations
        self._loop = asyncio.get_running_loop()
        self._reader: PartitionReader | None = None
        self._topics: dict[str, int] = {}
        """The topics that are read, with their partitions."""
        self._unknown = UnknownTopics()
        self.unread: str | None = None
        """A partition that is there and not read yet."""
        self._looked_at = self._look_s = 0.0
        """When the topics were last listed, and how long that took."""
        self._looking: asyncio.Task[None] | None = None

    async def discover(self) -> dict[str, int]:
        """All topics that a view reads, with their partitions. Raises BrokerUnavailable."""
        began = time.monotonic()
        topics = await self._threads.metadata.run(discover, self._settings)
        self._looked_at = time.monotonic()
        self._look_s = self._looked_at - began
        return topics

    def begin(self, topics: dict[str, int], reader: PartitionReader) -> None:
        """These topics are read from now on, by this reader."""
        self._reader = reader
        self._topics = topics

    @property
    def is_old(self) -> bool:
        """Whether the topics should be listed again before a request counts as unknown."""
        return time.monotonic() - self._looked_at > max(OLD_S, PAUSES * self._look_s)

    def knows(self, topic: str) -> bool:
        return topic in self._topics

    async def look_for(self, topic: str) -> bool:
        """Whether a topic is there that was not known; what is not there is remembered for a moment.

        Raises BrokerUnavailable.
        """
        if topic in self._unknown:
            return False
        if await self._threads.metadata.run(admin.partition_counts, self._settings, [topic]):
            await self.look()
        if topic not in self._topics:
            self._unknown.add(topic)
        return topic in self._topics

    async def look(self) -> None:
        """Look which topics and partitions there are, and read what is new. Who asks meanwhile shares one look."""
        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(self._read_what_is_there())
        await asyncio.shield(self._looking)

    async def count_conversations(self) -> None:
        """Count which conversations exist, for the limits of tenants. Raises BrokerUnavailable.

        They are listed on a thread. The loop takes over one set for each tenant, a few tenants in one go.
        """
        listed = await self._threads.metadata.run(conversations_by_tenant, self._settings, self._conversations)
        tenants, now_s = self._view.tenants, time.time()
        for number, tenant in enumerate([*listed, *(tenants.known().keys() - listed.keys())], start=1):
            tenants.on_conversations(tenant, listed.get(tenant, set()), now_s)
            if number % COUNTED_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _read_what_is_there(self) -> None:
        topics = await self.discover()
        there = set(partitions_of(topics))
        known = set(self._view.offsets())
        if new := sorted(there - known):
            # Until it is read this gateway is not whole, and says so.
            self.unread = f"{new[0][0]}/{new[0][1]}"
            await self._read_as_well(new)
        self.unread = None
        if gone := known - there:
            self._forget(gone)
        self._topics = topics
        self._view.result_partitions(topics[self._settings.names.result])

    async def _read_as_well(self, partitions: Sequence[TP]) -> None:
        """New pools' topics, and partitions that were added to topics: from their first record."""
        reader = self._reader
        if reader is None:
            return
        begin = await self._threads.metadata.run(admin.begin_offsets, self._settings, partitions)
        for tp, offset in begin.items():
            self._view.offsets().setdefault(tp, offset)
        reader.add_partitions(begin)
        logger.info("follower.partitions_added count=%d first=%s/%d", len(begin), *partitions[0])

    def _forget(self, gone: set[TP]) -> None:
        """Partitions of a pool that was taken away: their ends cannot be asked for any more."""
        reader = self._reader
        if reader is None:
            return

        def drop() -> None:
            for tp in gone:
                reader.drop(tp)

        reader.call(drop)
        self._view.forget_partitions(gone)
        logger.info("follower.partitions_gone count=%d", len(gone))
