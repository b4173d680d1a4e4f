"""Following the topics: a reader's thread hands batches to the loop, the view folds them; where it stands is known."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.threads import Threads
from penstock.gateway.view.ordered_reading import OrderedReading
from penstock.gateway.view.store import TP, Store
from penstock.gateway.view.topics_read import UnknownTopics, always_read, discover, partitions_of, where_to_begin
from penstock.gateway.view.view import View
from penstock.producers import admin
from penstock.producers.clock import now_ms
from penstock.producers.reader import STANDSTILL_S, BatchQueue, PartitionReader, RawMessage, empty_ranges
from penstock.producers.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError, RegistryUnavailable

logger = logging.getLogger(__name__)

FLUSH_S, CATCHING_UP_FLUSH_S = 0.2, 2.0
CROWDED = 50_000
"""While so many requests are live and outcomes are behind, a view that catches up reads outcomes alone."""
CATCH_UP_S = 2.0
BEHIND_S = 30.0
DISCOVERY_S = 1.0
"""How old the list of topics may be when a request is not found: it may be of a pool that is newer."""
LOOK_S = 2.0
"""So often it is asked whether a partition that does not move has anything to read at all."""
FOLDED_AT_ONCE = 100
BYTES_AT_ONCE = 256 * 1024
"""Records, and bytes of their values, that are folded before others on the loop have their turn."""


def folds(batch: Sequence[RawMessage]) -> Iterator[Sequence[RawMessage]]:
    """The batch in pieces that are folded at once. A record that is larger than one may be is a piece of its own."""
    start = size = 0
    for at, message in enumerate(batch):
        length = len(message.value or b"")
        if at > start and (at - start == FOLDED_AT_ONCE or size + length > BYTES_AT_ONCE):
            yield batch[start:at]
            start, size = at, 0
        size += length
    if batch:
        yield batch[start:]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this gateway can serve, and if not, why."""

    ready: bool
    reason: str | None = None
    starting: bool = False
    """It was never ready yet."""


class Follower:
    """Keeps a view at the end of its topics. All methods are called on the event loop."""

    def __init__(
        self,
        settings: KafkaSettings,
        view: View,
        store: Store,
        *,
        horizon_ms: int,
        rediscover_s: float,
        threads: Threads | None = None,
        on_caught_up: Callable[[], None] = lambda: None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_caught_up` is told once, before this is ready.

        `on_failure` is told once when following has ended for good, which only a new process mends.
        """
        self._settings = settings
        self._view = view
        self._store = store
        self._horizon_ms = horizon_ms
        self._rediscover_s = rediscover_s
        self._on_caught_up = on_caught_up
        self._on_failure = on_failure
        self._threads = threads or Threads()
        self._loop = asyncio.get_running_loop()
        self._queue = BatchQueue(self._loop)
        self._reading: OrderedReading | None = None
        self._reader: PartitionReader | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._waiters: list[tuple[Mapping[TP, int], asyncio.Future[None]]] = []
        self._topics: dict[str, int] = {}
        """The topics that are read, with their partitions."""
        self._unknown = UnknownTopics()
        self._unread: str | None = None
        self._begin: dict[TP, int] = {}
        self._goal: Mapping[TP, int] = {}
        """From where to where the first catching up goes."""
        self._caught_up = False
        self._discovered_at = 0.0
        self._stuck: dict[TP, tuple[int, float]] = {}
        """Partitions with lag: where the view stood there, and since when."""
        self._broker_lost = False
        self._failed: str | None = None
        self._looking: asyncio.Task[None] | None = None
        self._catching: asyncio.Task[None] | None = None
        self._next_catch: asyncio.Task[None] | None = None

    # -- running

    async def start(self) -> None:
        """Begin to read where the view stands. Raises NotFound, BrokerUnavailable."""
        topics = await self._threads.metadata.run(discover, self._settings, self._tell_conversations)
        since_ms = now_ms() - 2 * self._horizon_ms
        begin = await self._threads.metadata.run(
            where_to_begin, self._settings, topics, self._store.offsets(), since_ms
        )
        ends = await self._threads.metadata.run(admin.end_offsets, self._settings, self._told_of_requests(begin))
        self._reading = OrderedReading(
            self._settings,
            begin,
            ends,
            self._queue.put,
            is_crowded=lambda: self._view.live_count >= CROWDED,
            without_headers=frozenset(always_read(self._settings.names)),
            name="gateway-follower",
        )
        self._reader = self._reading.reader
        await asyncio.to_thread(self._reader.start)
        self._view.catching_up(True)
        self._topics = topics
        self._discovered_at = time.monotonic()
        self._begin = dict(begin)
        self._view.offsets().update(begin)
        self._tasks = [
            self._loop.create_task(self._guard(name, work))
            for name, work in (
                ("follow", self._follow()),
                ("flush", self._flush_forever()),
                ("rediscover", self._rediscover_forever()),
                ("catch-up", self._first_catch_up()),
            )
        ]

    async def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("follower.failed part=%s", name)
            self._fail(f"{name} failed")

    def _fail(self, reason: str) -> None:
        if self._failed is None:
            self._failed = reason
            self._on_failure(reason)

    async def _follow(self) -> None:
        while True:
            batch = await self._queue.get()
            for piece in folds(batch):
                await self._fold(piece)
                if self._view.is_due:
                    self._view.flush()
                while self._view.is_full and not self._view.flush():
                    await asyncio.sleep(0.02)  # the disk is behind: read no further until it has caught up
                # Batches that wait already would come without a pause, and readers' queues would run over.
                await asyncio.sleep(0)

    async def _fold(self, batch: Sequence[RawMessage]) -> None:
        while True:
            try:
                self._view.apply(batch)
            except RegistryUnavailable as error:
                logger.warning("follower.waits_for_registry error=%s", error)
                offsets = self._view.offsets()
                batch = [m for m in batch if m.offset >= offsets.get((m.topic, m.partition), 0)]
                while not await asyncio.to_thread(self._view.look_up, batch[0]):
                    await asyncio.sleep(1)
            else:
                return
            finally:
                self._wake()

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
            await asyncio.sleep(FLUSH_S if self._caught_up else CATCHING_UP_FLUSH_S)
            self._view.flush()
            if self._reader is not None and self._reader.failure is not None:
                self._fail(f"reading the topics failed: {self._reader.failure}")

    async def _rediscover_forever(self) -> None:
        """New pools' topics, the view's age, and whether reading moves."""
        next_prune = 0.0
        while True:
            await asyncio.sleep(self._rediscover_s)
            try:
                await self._rediscover()
                await self._look_at_lag()
                self._broker_lost = False
                if time.monotonic() >= next_prune:
                    next_prune = time.monotonic() + 600
                    before = now_ms() - 2 * self._horizon_ms
                    await asyncio.to_thread(self._store.prune, before)
                    self._view.prune(before)
                self._view.forget_stale_workers(60)
            except PenstockError as error:
                self._broker_lost = True
                logger.warning("follower.rediscover_failed error=%s", error.code)
            except sqlite3.Error as error:
                logger.warning("follower.prune_failed error=%s", error)

    async def _rediscover(self) -> None:
        """Look which topics and partitions there are, and read what is new. Who asks meanwhile shares one look."""
        if self._looking is None or self._looking.done():
            self._looking = self._loop.create_task(self._read_what_is_there())
        await asyncio.shield(self._looking)

    def _tell_conversations(self, listed: list[tuple[str, str]]) -> None:
        """Which conversations there are, from the thread that looked."""
        self._loop.call_soon_threadsafe(self._view.tenants.on_conversations, listed, time.time())

    async def _read_what_is_there(self) -> None:
        topics = await self._threads.metadata.run(discover, self._settings, self._tell_conversations)
        self._discovered_at = time.monotonic()
        there = set(partitions_of(topics))
        known = set(self._view.offsets())
        if new := sorted(there - known):
            # Until it is read this gateway is not whole, and says so.
            self._unread = f"{new[0][0]}/{new[0][1]}"
            await self._read_as_well(new)
        self._unread = None
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
        for tp in gone:
            self._stuck.pop(tp, None)
        logger.info("follower.partitions_gone count=%d", len(gone))

    async def _look_at_lag(self) -> None:
        ends = await self._threads.metadata.run(admin.end_offsets, self._settings, list(self._view.offsets()))
        stuck_at = {tp: offset for tp, (offset, _) in self._stuck.items()}
        await self._pass_empty_ends(
            {tp: end for tp, end in ends.items() if tp in stuck_at and self._stands_at(tp, stuck_at)}
        )
        before = dict(self._view.offsets())
        now, stuck = time.monotonic(), dict[TP, tuple[int, float]]()
        for tp, end in ends.items():
            if tp in before and before[tp] < end:
                position, since = self._stuck.get(tp, (-1, now))
                stuck[tp] = (before[tp], since if position == before[tp] else now)
        self._stuck = stuck

    async def _first_catch_up(self) -> None:
        while not self._caught_up:
            try:
                await self._catch_up(120)
                # One large batch more, copied before anybody is served.
                while not self._view.flush() and self._store.failure is None:
                    await asyncio.sleep(0.02)
                self._view.catching_up(False)
                self._caught_up = True
                if self._reading is not None:
                    self._reading.finish()
                self._on_caught_up()
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
        """Look whether a pool's topic exists that was not there before; what is not there is remembered for a moment.

        Raises BrokerUnavailable.
        """
        if topic in self._unknown:
            return False
        await self._rediscover()
        if topic not in self._topics:
            self._unknown.add(topic)
        return topic in self._topics

    def stands_still(self) -> str | None:
        """Why nothing is read now, so that what this view says may be old; None when it is not so."""
        if self._failed is not None:
            return self._failed
        if self._store.failure is not None and self._view.is_full:
            return f"the view cannot be written ({self._store.failure})"
        return None

    def readiness(self) -> Readiness:
        if self._failed is not None:
            return Readiness(False, self._failed)
        if self._store.failure is not None:
            return Readiness(False, f"the view cannot be written ({self._store.failure})")
        if not self._caught_up:
            return Readiness(False, f"catching up with the topics{self._progress()}", starting=True)
        if self._unread is not None:
            return Readiness(False, f"the partition {self._unread} is not read yet")
        if self._broker_lost:
            return Readiness(False, "the broker does not answer")
        offsets, now = self._view.offsets(), time.monotonic()
        if any(offsets.get(tp) == at and now - since > BEHIND_S for tp, (at, since) in self._stuck.items()):
            return Readiness(False, "behind the topics and not moving")
        return Readiness(True)

    def _progress(self) -> str:
        """How much of what stood there at the start is read."""
        if not self._goal:
            return ""
        offsets, begin = self._view.offsets(), self._begin
        ranges = [(begin.get(tp, end), min(offsets.get(tp, 0), end), end) for tp, end in self._goal.items()]
        done, whole = sum(at - first for first, at, _ in ranges), sum(end - first for first, _, end in ranges)
        return f": {done:,} of {whole:,} records" if whole > 0 else ""

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
        if time.monotonic() - self._discovered_at > DISCOVERY_S:
            try:
                async with asyncio.timeout(deadline_s):
                    await self._rediscover()
            except TimeoutError as error:
                raise BrokerUnavailable("the broker does not answer; try again", retry_after_s=1) from error
        partitions = self._told_of_requests(self._view.offsets())
        try:
            ends = await self._threads.ends.run(admin.end_offsets, self._settings, partitions, min(deadline_s, 10))
        except NotFound as error:  # a broker that has just started may not know its topics yet
            raise BrokerUnavailable(f"the broker does not know its topics now: {error}", retry_after_s=1) from error
        if not self._caught_up:
            self._goal = ends
        give_up, next_look = time.monotonic() + deadline_s, 0.0
        while (now := time.monotonic()) < give_up:
            before = dict(self._view.offsets())
            if await self.reached(ends, min(STANDSTILL_S, give_up - now)):
                return
            if now >= next_look:
                # Only where nothing moves there may be nothing to read.
                await self._pass_empty_ends({tp: end for tp, end in ends.items() if self._stands_at(tp, before)})
                next_look = now + LOOK_S
        raise BrokerUnavailable("the gateway is behind the topics; try again", retry_after_s=1)

    def _told_of_requests(self, partitions: Iterable[TP]) -> list[TP]:
        """Those whose records say something of requests."""
        quiet = {self._settings.names.model, self._settings.names.worker}
        return [tp for tp in partitions if tp[0] not in quiet]

    def _stands_at(self, tp: TP, before: Mapping[TP, int]) -> bool:
        return self._view.offsets().get(tp) == before.get(tp)

    async def _pass_empty_ends(self, ends: Mapping[TP, int]) -> None:
        """A transaction's marker may stand at the end: no record will ever come that moves the view there."""
        offsets = self._view.offsets()
        ranges = {tp: (offsets[tp], end) for tp, end in ends.items() if tp in offsets and offsets[tp] < end}
        if not ranges:
            return
        for tp, end in (await self._threads.metadata.run(empty_ranges, self._settings, ranges)).items():
            if offsets.get(tp) == ranges[tp][0]:
                offsets[tp] = end
