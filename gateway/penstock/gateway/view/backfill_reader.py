"""Reads the past of a view from the log while the view serves, until nothing of it is missing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from penstock.common.reader import BatchQueue, PartitionReader
from penstock.common.settings import KafkaSettings
from penstock.gateway.threads import Threads
from penstock.gateway.view.backfill import Backfill, records_between
from penstock.gateway.view.ends import Ends
from penstock.gateway.view.ordered_reading import CROWDED, OrderedReading
from penstock.gateway.view.pieces import Folding, folds
from penstock.gateway.view.progress import ReadProgress, duration_text
from penstock.gateway.view.selecting import Selection
from penstock.gateway.view.snapshot_import import SnapshotImport
from penstock.gateway.view.store import Store
from penstock.gateway.view.topics_read import always_read
from penstock.gateway.view.view import View
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

FOLDED_AT_ONCE = 10
"""Records that are folded before what is served has its turn on the loop, for as long: some 0.2 ms."""
EVICTED_AT_ONCE = 50
CLOSE_RECORDS = 500
"""So near to the follower it is waited for what is missing, and what the follower leaves out is kept meanwhile."""
WAIT_S = 60.0
RETRY_S = 1.0
WRITER_S = 0.005


class BackfillReader:
    """On the event loop. `run` takes as long as the reading."""

    def __init__(
        self,
        settings: KafkaSettings,
        view: View,
        store: Store,
        threads: Threads,
        backfill: Backfill,
    ) -> None:
        self._settings = settings
        self._view, self._store, self._backfill = view, store, backfill
        self._queue = BatchQueue(asyncio.get_running_loop())
        self._ends = Ends(settings, backfill, threads)
        self._folding = Folding(view.apply_backfill, backfill.offsets)
        self._progress = ReadProgress()
        self._reader: PartitionReader | None = None

    @property
    def failure(self) -> BaseException | None:
        """Why reading ended."""
        return None if self._reader is None else self._reader.failure

    def text(self) -> str:
        """Up to when the history is known, and how long the rest takes."""
        left_s = self.left_s()
        return f"history until {rfc3339(self._backfill.until_ms)}" + (
            "" if left_s is None else f", whole in about {duration_text(left_s)}"
        )

    def left_s(self) -> float | None:
        return self._progress.left_s(self._backfill.offsets(), time.monotonic())

    async def run(self, importing: SnapshotImport | None = None) -> None:
        """Read until nothing is missing. The view counts all of it from then on."""
        began_s = time.monotonic()
        if importing is not None:
            await importing.run(self._backfill)
        begin, goal = dict(self._backfill.offsets()), self._backfill.ends
        logger.info("history.begins records=%d", records_between(begin, goal))
        self._progress = ReadProgress(begin=begin, goal=goal, began_s=time.monotonic())
        self._reader = reader = self._reader_from(begin)
        await asyncio.to_thread(reader.start)
        try:
            async with asyncio.TaskGroup() as group:
                folding = group.create_task(self._fold())
                await self._reach_the_follower()
                folding.cancel()
        finally:
            self._queue.close()
            await asyncio.to_thread(reader.stop)
        for _ in self._view.end_backfill():
            await asyncio.sleep(0)
            while kept := self._backfill.take_kept(FOLDED_AT_ONCE):
                await self._folding.fold(kept)
                await asyncio.sleep(0)
        logger.info("history.whole seconds=%.1f", time.monotonic() - began_s)

    def _reader_from(self, begin: Mapping[TP, int]) -> PartitionReader:
        names, view = self._settings.names, self._view
        select = Selection(names, frozenset(always_read(names)), view.codec, view.streams.followed)
        return OrderedReading(
            self._settings,
            begin,
            self._backfill.ends,
            self._queue.put,
            is_crowded=lambda: view.live_count >= CROWDED,
            select=select,
        ).reader

    async def _fold(self) -> None:
        while True:
            for piece in folds(await self._queue.get(), FOLDED_AT_ONCE):
                # The follower fills the rest of the room: it never waits for the disk because of this.
                while self._view.known.unwritten.is_due and (self._store.is_busy or not self._view.flush()):
                    await asyncio.sleep(WRITER_S)
                began = time.monotonic()
                await self._folding.fold(piece)
                self._ends.wake()
                self._view.evict_to_disk(EVICTED_AT_ONCE)
                await asyncio.sleep(time.monotonic() - began)

    async def _reach_the_follower(self) -> None:
        goal: Mapping[TP, int] = self._backfill.ends
        while True:
            await self._reach(goal)
            goal = dict(self._view.offsets())
            if records_between(self._backfill.offsets(), self._there(goal)) <= CLOSE_RECORDS:
                break
        self._backfill.keep_what_comes()
        await self._reach(goal)

    async def _reach(self, goal: Mapping[TP, int]) -> None:
        while True:
            try:
                await self._ends.reach(self._there(goal), WAIT_S)
            except BrokerUnavailable as error:
                logger.debug("history.waits reason=%s", error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _there(self, goal: Mapping[TP, int]) -> dict[TP, int]:
        """Of partitions of the past that are there still."""
        return {tp: goal[tp] for tp in self._backfill.offsets() if tp in goal}
