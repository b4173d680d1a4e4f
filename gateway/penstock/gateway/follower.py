"""Following the topics: a reader's thread hands batches to the loop, the view folds them; where it stands is known."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.gateway.store import TP, Store
from penstock.gateway.view import View
from penstock.producers import admin
from penstock.producers.reader import BatchQueue, PartitionReader
from penstock.producers.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable, PenstockError

logger = logging.getLogger(__name__)

FLUSH_S = 0.2
CATCH_UP_S = 2.0
BEHIND_S = 30.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this gateway can serve, and if not, why."""

    ready: bool
    reason: str | None = None


class Follower:
    """Keeps a view at the end of its topics. All methods are called on the event loop."""

    def __init__(
        self, settings: KafkaSettings, view: View, store: Store, *, horizon_ms: int, rediscover_s: float
    ) -> None:
        self._settings = settings
        self._view = view
        self._store = store
        self._horizon_ms = horizon_ms
        self._rediscover_s = rediscover_s
        self._loop = asyncio.get_running_loop()
        self._queue = BatchQueue(self._loop)
        self._reader: PartitionReader | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._waiters: list[tuple[Mapping[TP, int], asyncio.Future[None]]] = []
        self._topics: set[str] = set()
        self._caught_up = False
        self._lagging_since: float | None = None
        self._catching: asyncio.Task[None] | None = None
        self._next_catch: asyncio.Task[None] | None = None

    # -- running

    async def start(self) -> None:
        """Begin to read where the view stands. Raises NotFound, BrokerUnavailable."""
        topics = await asyncio.to_thread(self._discover)
        begin = await asyncio.to_thread(self._where_to_begin, topics)
        reader = PartitionReader(self._settings, begin, "beginning", self._queue.put, name="gateway-follower")
        await asyncio.to_thread(reader.start)
        self._reader = reader
        self._topics = set(topics)
        self._view.offsets().update(begin)
        self._tasks = [
            self._loop.create_task(work, name=name)
            for name, work in (
                ("follow", self._follow()),
                ("flush", self._flush_forever()),
                ("rediscover", self._rediscover_forever()),
                ("catch-up", self._first_catch_up()),
            )
        ]

    def _discover(self) -> list[str]:
        """Every topic that the view reads: the fixed ones and the request topics of all pools."""
        names = self._settings.names
        found = admin.partition_counts(self._settings)
        wanted = [names.result, names.status, names.control, names.model, names.worker]
        missing = [topic for topic in (*wanted, *names.request_topics()) if topic not in found]
        if missing:
            raise BrokerUnavailable(f"the topic {missing[0]} does not exist; `penstock topics create` makes it")
        return [*wanted, *(topic for topic in found if names.is_request_topic(topic))]

    def _where_to_begin(self, topics: Iterable[str]) -> dict[TP, int]:
        """The stored offset of each partition; for others, and what retention has passed, two horizons ago."""
        counts = admin.partition_counts(self._settings)
        partitions = [(topic, number) for topic in topics for number in range(counts[topic])]
        first = admin.begin_offsets(self._settings, partitions)
        end = admin.end_offsets(self._settings, partitions)
        names = self._settings.names
        stored = self._store.offsets()
        # Models and workers are kept in memory alone: their (small) topics are read from the start each time.
        in_memory = {names.model, names.worker}
        known = {
            tp: stored[tp]
            for tp in partitions
            if tp in stored and first[tp] <= stored[tp] <= end[tp] and tp[0] not in in_memory
        }
        fresh = [tp for tp in partitions if tp not in known and tp[0] not in in_memory]
        since = int(time.time() * 1000) - 2 * self._horizon_ms
        return (
            {tp: first[tp] for tp in partitions if tp[0] in in_memory}
            | admin.offsets_at(self._settings, fresh, since)
            | known
        )

    async def _follow(self) -> None:
        while True:
            batch = await self._queue.get()
            self._view.apply(batch)
            self._wake()
            while self._view.backlog > 20_000 and not self._view.flush():
                await asyncio.sleep(0.02)  # the disk is behind: read no further until it has caught up

    def _wake(self) -> None:
        if not self._waiters:
            return
        offsets = self._view.offsets()
        left: list[tuple[Mapping[TP, int], asyncio.Future[None]]] = []
        for ends, future in self._waiters:
            if future.done():
                continue
            if all(offsets.get(tp, 0) >= end for tp, end in ends.items()):
                future.set_result(None)
            else:
                left.append((ends, future))
        self._waiters = left

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            self._view.flush()

    async def _rediscover_forever(self) -> None:
        """New pools' topics, the view's age, and whether reading moves."""
        next_prune = 0.0
        while True:
            await asyncio.sleep(self._rediscover_s)
            try:
                await self._rediscover()
                if time.monotonic() >= next_prune:
                    next_prune = time.monotonic() + 600
                    before = int(time.time() * 1000) - 2 * self._horizon_ms
                    await asyncio.to_thread(self._store.prune, before)
                self._view.forget_stale_workers(60)
            except PenstockError as error:
                logger.warning("follower.rediscover_failed error=%s", error.code)

    async def _rediscover(self) -> None:
        topics = await asyncio.to_thread(self._discover)
        new = [topic for topic in topics if topic not in self._topics]
        if new and self._reader is not None:
            await asyncio.to_thread(self._reader.add_topics, new)
            self._topics.update(new)
            logger.info("follower.topics_added count=%d", len(new))
        await self._look_at_lag()

    async def _look_at_lag(self) -> None:
        ends = await asyncio.to_thread(admin.end_offsets, self._settings, list(self._view.offsets()))
        before = dict(self._view.offsets())
        lagging = any(before.get(tp, 0) < end for tp, end in ends.items())
        if not lagging:
            self._lagging_since = None
        elif self._lagging_since is None:
            self._lagging_since = time.monotonic()

    async def _first_catch_up(self) -> None:
        while not self._caught_up:
            try:
                await self._catch_up(120)
                self._caught_up = True
                logger.info("follower.caught_up live=%d", self._view.live_count)
            except PenstockError as error:
                logger.warning("follower.not_caught_up error=%s", error.code)
                await asyncio.sleep(1)

    async def stop(self) -> None:
        """Stop reading, write what is folded."""
        self._queue.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reader is not None:
            await asyncio.to_thread(self._reader.stop)
        give_up = time.monotonic() + 5
        while not self._view.flush() and time.monotonic() < give_up:
            await asyncio.sleep(0.02)

    # -- where it stands

    def known_topic(self, topic: str) -> bool:
        return topic in self._topics

    async def add_topic_now(self, topic: str) -> bool:
        """Look at once whether a pool's topic exists that was not there at the last discovery."""
        await self._rediscover()
        return topic in self._topics

    def readiness(self) -> Readiness:
        if not self._caught_up:
            return Readiness(False, "catching up with the topics")
        if self._reader is not None and self._reader.failure is not None:
            return Readiness(False, "reading the topics failed")
        if self._store.failure is not None:
            return Readiness(False, "the view cannot be written")
        if self._lagging_since is not None and time.monotonic() - self._lagging_since > BEHIND_S:
            return Readiness(False, "behind the topics and not moving")
        return Readiness(True)

    async def reached(self, ends: Mapping[TP, int], deadline_s: float) -> bool:
        """Wait until the view has folded up to these ends; False at the deadline."""
        offsets = self._view.offsets()
        if all(offsets.get(tp, 0) >= end for tp, end in ends.items()):
            return True
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((ends, future))
        try:
            await asyncio.wait_for(future, deadline_s)
        except TimeoutError:
            return False
        return True

    async def catch_up(self) -> None:
        """Wait (2 s at most) until the view holds all that stood in the log at this call. Raises BrokerUnavailable.

        Callers share: one look at the ends is under way, and one more may wait behind it for all who came meanwhile.
        """
        if self._catching is None or self._catching.done():
            self._catching = self._loop.create_task(self._catch_up(CATCH_UP_S))
            await asyncio.shield(self._catching)
            return
        if self._next_catch is None or self._next_catch.done():
            self._next_catch = self._loop.create_task(self._catch_up_after(self._catching))
        await asyncio.shield(self._next_catch)

    async def _catch_up_after(self, running: asyncio.Task[None]) -> None:
        await asyncio.wait([running])
        self._catching, self._next_catch = self._next_catch, None
        await self._catch_up(CATCH_UP_S)

    async def _catch_up(self, deadline_s: float) -> None:
        names = self._settings.names
        quiet = {names.model, names.worker}
        partitions = [tp for tp in self._view.offsets() if tp[0] not in quiet]
        ends = await asyncio.to_thread(admin.end_offsets, self._settings, partitions, min(deadline_s, 10))
        if not await self.reached(ends, deadline_s):
            raise BrokerUnavailable("the gateway is behind the topics; try again", retry_after_s=1)
