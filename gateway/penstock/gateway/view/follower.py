"""Following the topics: a reader's thread hands batches to the loop, the view folds them; where it stands is known."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.reader import BatchQueue, PartitionReader
from penstock.common.settings import KafkaSettings
from penstock.common.tasks import end_all
from penstock.gateway.threads import Threads
from penstock.gateway.view.backfill import Backfill, records_between
from penstock.gateway.view.backfill_reader import BackfillReader
from penstock.gateway.view.ends import Ends
from penstock.gateway.view.history import KEPT_MINUTES, MINUTE_MS
from penstock.gateway.view.ordered_reading import CROWDED, OrderedReading
from penstock.gateway.view.piece_reader import PieceReader
from penstock.gateway.view.pieces import FOLDED_AT_ONCE, Folding, folds
from penstock.gateway.view.progress import ReadProgress
from penstock.gateway.view.selecting import Selection
from penstock.gateway.view.shared_calls import SharedCalls
from penstock.gateway.view.snapshot_import import SnapshotImport
from penstock.gateway.view.snapshots import Snapshots
from penstock.gateway.view.store import TP, Store
from penstock.gateway.view.topic_watch import TopicWatch
from penstock.gateway.view.topics_read import ListConversations, MissingTopics, always_read, where_to_begin
from penstock.gateway.view.usage import FILE_DAYS, day_of
from penstock.gateway.view.usage_topic import read_totals
from penstock.gateway.view.view import View
from penstock.schemas.errors import BrokerUnavailable, Forbidden, NotFound, Overloaded, PenstockError

logger = logging.getLogger(__name__)

FLUSH_S, CATCHING_UP_FLUSH_S = 0.2, 2.0
LOG_PROGRESS_S = 10.0
READ_FIRST = 10_000
"""So many records are read before anybody is served: that takes a second or two. More are read while
the view serves."""
FOLDED_WITH_LOOKS = 25
"""Records that are folded at once while each may need a look into the view's file."""
EVICTED_AT_ONCE = 200
"""Live requests that are looked at in one go, whether they may be left to the file: that takes 0.2 ms."""
MARK_S = 3.0
"""So long a stop waits until a file whose history was just read says so."""
CATCH_UP_S = 2.0
LOOK_AGAIN_S = 2.0
"""So long after a lookup of the topics that failed the next one begins."""
LEFT_S = (1.0, 30.0)
"""So soon, and so late, a client is asked to come again while the history is read."""
ASK_AGAIN_S = 5.0
"""After so long a broker that did not answer is asked for the end of the commands again."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this gateway can serve, and if not, why."""

    ready: bool
    reason: str | None = None
    starting: bool = False
    """It was never ready yet."""
    lacks: str | None = None
    """What of the history is not known yet, though this gateway serves."""


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
        conversations: ListConversations | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`on_caught_up` is called once, before this is ready.

        `on_failure` is called once when following has ended for good, which only a new process mends. `conversations`
        lists them where they have no topics of their own.
        """
        self._settings = settings
        self._view = view
        self._store = store
        self._horizon_ms = horizon_ms
        self._rediscover_s = rediscover_s
        self._on_caught_up = on_caught_up
        self._on_failure = on_failure
        self._snapshots = snapshots
        self._importing: SnapshotImport | None = None
        self._threads = threads or Threads()
        self._loop = asyncio.get_running_loop()
        self._queue = BatchQueue(self._loop)
        self._reading: OrderedReading | None = None
        self._reader: PartitionReader | None = None
        self._selection: Selection | None = None
        self._pieces: PieceReader | None = None
        self._watch = TopicWatch(settings, view, self._threads, conversations)
        self._ends = Ends(settings, view, self._threads)
        self._tasks: list[asyncio.Task[None]] = []
        self._began_ms = now_ms()
        self._progress = ReadProgress()
        self._caught_up = False
        self._lookup_failure: str | None = None
        """Why the last lookup of the topics failed."""
        self._folding = Folding(view.apply, view.offsets)
        self._first: Mapping[TP, int] = {}
        """Up to where models, reports and claims are read before anybody is served."""
        self._backfill: BackfillReader | None = None
        """There while the history is read."""
        self._is_unmarked = False
        """The history was read, and the file does not say so yet."""
        self._failed: str | None = None
        self._catching = SharedCalls(lambda: self._catch_up(CATCH_UP_S))
        self._reading_commands = SharedCalls(self._read_commands)
        self._commands_after_s = 0.0
        """From when on the end of the commands may be asked for again: the broker did not answer the last time."""

    # -- running

    async def start(self) -> None:
        """Begin to read where the view stands. Raises NotFound, BrokerUnavailable."""
        if self._snapshots is not None and not self._store.offsets():
            self._importing = SnapshotImport(self._snapshots, self._view, self._store)
        topics = await self._watch.discover()
        await self._watch.count_conversations()
        usage_ends = await self._read_usage(topics)
        since_ms = now_ms() - 2 * self._horizon_ms
        begin = await self._threads.metadata.run(
            where_to_begin, self._settings, topics, self._store.offsets(), since_ms
        )
        begin |= usage_ends
        ends = await self._ends_of(begin)
        told = self._ends.partitions_of_requests(begin)
        self._first = {tp: ends.pop(tp) for tp in begin.keys() - told}
        self._view.reports.begin(self._first[self._settings.names.worker, 0])
        # Facts of conversations are read from their first record at each start, whatever the file holds.
        to_read = {tp: end for tp, end in ends.items() if tp[0] != self._settings.names.conversation_facts}
        if records_between(begin, to_read) > READ_FIRST:
            begin = await self._begin_backfill(begin, ends, since_ms)
        elif self._importing is not None:
            self._importing.stop()
        self._selection = Selection(
            self._settings.names,
            frozenset(always_read(self._settings.names)),
            self._view.codec,
            self._view.streams.followed,
        )
        self._reading = OrderedReading(
            self._settings,
            begin,
            ends,
            self._queue.put,
            is_crowded=lambda: self._view.live_count >= CROWDED,
            select=self._selection,
        )
        self._reader = self._reading.reader
        self._pieces = PieceReader(self._settings, self._view.codec, self._view.streams, self._reader, self._threads)
        await asyncio.to_thread(self._reader.start)
        self._view.known.catching_up = True
        self._watch.begin(topics, self._reader)
        self._progress = ReadProgress(begin=dict(begin), began_s=time.monotonic())
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

    async def _read_usage(self, topics: Mapping[str, int]) -> dict[TP, int]:
        """Totals are known before outcomes are added to them. From where to follow their topic."""
        usage, codec, names = self._view.known.usage, self._view.codec, self._settings.names
        usage.close_days(now_ms())
        totals, ends = await self._threads.metadata.run(read_totals, self._settings, codec, topics.get(names.usage, 0))
        for number, total in enumerate(totals, start=1):
            usage.merge(total, now_ms())
            if number % FOLDED_AT_ONCE == 0:
                await asyncio.sleep(0)
        results = [(names.result, number) for number in range(topics[names.result])]
        result_ends = await self._threads.metadata.run(admin.end_offsets, self._settings, results)
        usage.end_at({number: end for (_, number), end in result_ends.items()}, now_ms())
        return ends

    async def _ends_of(self, begin: Mapping[TP, int]) -> dict[TP, int]:
        """The ends of these partitions. Those of requests are asked for last, see `Backfill`."""
        ends: dict[TP, int] = {}
        for of_requests in (False, True):
            some = [tp for tp in begin if self._settings.names.is_request_topic(tp[0]) is of_requests]
            ends |= await self._threads.metadata.run(admin.end_offsets, self._settings, some)
        return ends

    async def _begin_backfill(self, begin: Mapping[TP, int], ends: Mapping[TP, int], since_ms: int) -> dict[TP, int]:
        """Follow from these ends on, and read what lies before them while this view serves. From where to follow."""
        names = self._settings.names
        told = {tp: end for tp, end in ends.items() if tp[0] != names.conversation_facts}
        backfill = Backfill(begin, told, since_ms, now_ms())
        await asyncio.to_thread(self._store.is_whole, False)
        self._view.begin_backfill(backfill)
        self._backfill = BackfillReader(self._settings, self._view, self._store, self._threads, backfill)
        # Commands are few, and what was erased must be known to be so at once.
        return {**begin, **{tp: end for tp, end in backfill.ends.items() if tp[0] != names.control}}

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
            for piece in folds(batch, FOLDED_WITH_LOOKS if self._view.known.some_on_disk else FOLDED_AT_ONCE):
                await self._folding.fold(piece)
                self._ends.wake()
                if self._view.known.unwritten.is_due:
                    self._view.flush()
                while self._view.known.unwritten.is_full and not self._view.flush():
                    await asyncio.sleep(0.02)  # the disk is behind: read no further until it has caught up
                self._view.evict_to_disk(EVICTED_AT_ONCE)
                # Batches that wait already would come without a pause, and readers' queues would run over.
                await asyncio.sleep(0)

    async def _flush_forever(self) -> None:
        log_at_s = time.monotonic() + LOG_PROGRESS_S
        while True:
            await asyncio.sleep(FLUSH_S if self._caught_up else CATCHING_UP_FLUSH_S)
            if time.monotonic() >= log_at_s and (text := self.catching_up()) is not None:
                logger.info("follower.catching_up state=%r", text)
                log_at_s = time.monotonic() + LOG_PROGRESS_S
            self._view.flush()
            self._view.evict_to_disk(EVICTED_AT_ONCE)
            if self._store.has_ended:
                self._fail(f"writing the view failed: {self._store.failure}")
            for reader in (self._reader, self._backfill):
                if reader is not None and reader.failure is not None:
                    self._fail(f"reading the topics failed: {reader.failure}")

    async def _rediscover_forever(self) -> None:
        """New pools' topics, the view's age, and whether reading moves."""
        next_prune = 0.0
        while True:
            await asyncio.sleep(self._rediscover_s if self._lookup_failure is None else LOOK_AGAIN_S)
            try:
                await self._watch.look()
                await self._watch.count_conversations()
                await self._ends.look_at_lag()
                self._lookup_failure = None
                if time.monotonic() >= next_prune:
                    next_prune = time.monotonic() + 600
                    await self._prune(now_ms() - 2 * self._horizon_ms)
                self._view.fleet.forget_stale_workers(60)
                self._view.gateways.clock_is(now_ms())
            except PenstockError as error:
                self._lookup_failure = _public_reason(error)
                logger.warning("follower.rediscover_failed error=%s", error.code)
            except sqlite3.Error as error:
                logger.warning("follower.prune_failed error=%s", error)

    async def _prune(self, before_ms: int) -> None:
        """Forget what nothing was heard of since. What lives has been silent no longer than this gateway runs."""
        while await asyncio.to_thread(self._store.prune, before_ms):
            pass
        before = now_ms() // MINUTE_MS - KEPT_MINUTES, day_of(now_ms(), FILE_DAYS)
        await asyncio.to_thread(self._store.prune_counted, *before)
        self._view.known.usage.close_days(now_ms())
        if self._began_ms >= before_ms:
            return
        while silent := await asyncio.to_thread(self._store.silent_live, before_ms):
            forgotten = self._view.forget(silent, before_ms)
            if not forgotten:
                return  # there is news of all of them, which is on its way to the file
            await asyncio.to_thread(self._store.delete, [entry.key for entry in forgotten], before_ms)
            self._view.known.are_gone(forgotten)

    async def _first_catch_up(self) -> None:
        while not self._caught_up:
            try:
                await self._catch_up(120)
                await self._ends.reach(self._first, 120)
                # One large batch more, copied before anybody is served.
                while not self._view.flush() and self._store.failure is None:
                    await asyncio.sleep(0.02)
                self._view.known.catching_up = False
                self._caught_up = True
                if self._reading is not None:
                    self._reading.finish()
                self._on_caught_up()
                if self._backfill is not None:
                    self._tasks.append(
                        self._loop.create_task(self._guard("history", self._read_backfill(self._backfill)))
                    )
                logger.info("follower.caught_up live=%d", self._view.live_count)
            except PenstockError as error:
                logger.warning("follower.not_caught_up error=%s", error.code)
                await asyncio.sleep(1)

    async def _read_backfill(self, backfill: BackfillReader) -> None:
        await backfill.run(self._importing)
        self._backfill, self._is_unmarked = None, True
        await self._mark_whole()
        self._on_caught_up()

    async def _mark_whole(self) -> None:
        """The file says that it is whole, once all that is known is in it."""
        written = threading.Event()
        while not self._view.flush(written):
            await asyncio.sleep(0.02)
        while not await asyncio.to_thread(written.wait, 1):
            pass
        while self._is_unmarked:
            try:
                await asyncio.to_thread(self._store.is_whole, True)
                self._is_unmarked = False
            except sqlite3.Error as error:  # a disk that is full: it is emptied
                logger.warning("follower.not_marked error=%s", error)
                await asyncio.sleep(1)

    async def stop(self) -> None:
        """Stop reading, write what is folded."""
        self._queue.close()
        await end_all(self._tasks)
        if self._importing is not None:
            self._importing.stop()
        if self._pieces is not None:
            await self._pieces.stop()
        if self._reader is not None:
            await asyncio.to_thread(self._reader.stop)
        give_up = time.monotonic() + 5
        while not self._view.flush() and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        if self._is_unmarked:
            with suppress(TimeoutError):
                async with asyncio.timeout(MARK_S):
                    await self._mark_whole()

    # -- where it stands

    def records(self, outcomes_read: int) -> dict[str, int]:
        """Records of requests, statuses and results since the start: decoded, passed over, read again for a client."""
        if self._selection is None or self._pieces is None:
            return {}
        decoded = self._view.decoded
        passed_over = max(0, self._selection.read - decoded)
        return {"decoded": decoded, "passed_over": passed_over, "read_again": self._pieces.read_again + outcomes_read}

    @property
    def lag(self) -> dict[str, int]:
        """As `Ends.lag`."""
        return self._ends.lag

    def known_topic(self, topic: str) -> bool:
        return self._watch.knows(topic)

    async def add_topic_now(self, topic: str) -> bool:
        """As `TopicWatch.look_for`."""
        return await self._watch.look_for(topic)

    async def reached(self, ends: Mapping[TP, int], deadline_s: float) -> bool:
        """As `Ends.reached`."""
        return await self._ends.reached(ends, deadline_s)

    def stands_still(self) -> str | None:
        """Why nothing is read now, so that what this view says may be old; None when it is not so."""
        if self._failed is not None:
            return self._failed
        if self._store.failure is not None and self._view.known.unwritten.is_full:
            return f"the view cannot be written ({self._store.failure})"
        return None

    def cannot_keep(self) -> str | None:
        """Why what happens now cannot be kept here, so that nothing may begin; None when it can."""
        if self._failed is not None:
            return self._failed
        return None if self._store.failure is None else f"the view cannot be written ({self._store.failure})"

    def catching_up(self) -> str | None:
        """That this view has not seen all that stood in the topics at its start; None once it has."""
        if self._caught_up:
            return None
        waits = "" if self._folding.waits_for is None else f"; {self._folding.waits_for}"
        progress = self._progress.text(self._view.offsets(), time.monotonic())
        return f"catching up with the topics{progress and f': {progress}'}{waits}"

    def readiness(self) -> Readiness:
        if (reason := self.cannot_keep()) is not None:
            return Readiness(False, reason)
        if self._reader is not None and (reason := self._reader.rights.reason) is not None:
            return Readiness(False, reason)
        if (reason := self.catching_up()) is not None:
            return Readiness(False, reason, starting=True)
        if self._watch.unread is not None:
            return Readiness(False, f"the partition {self._watch.unread} is not read yet")
        if self._lookup_failure is not None:
            return Readiness(False, self._lookup_failure)
        if self._ends.stands_still:
            return Readiness(False, self._folding.waits_for or "behind the topics and not moving")
        return Readiness(True, lacks=self.lacks())

    def lacks(self) -> str | None:
        """What of the history is not known yet; None once all is."""
        return None if self._backfill is None else self._backfill.text()

    def is_whole(self) -> bool:
        """Whether the whole history is known, and the file says so."""
        return self._caught_up and self._backfill is None and not self._is_unmarked and self._failed is None

    def check_whole(self) -> None:
        """Raises Overloaded while the history is not known: then nobody can say here what there is not."""
        if self._backfill is not None:
            left_s = self._backfill.left_s() or LEFT_S[0]
            raise Overloaded(
                f"this gateway does not know it and still reads the log ({self._backfill.text()}):"
                " use another gateway now, or retry later",
                retry_after_s=min(max(left_s, LEFT_S[0]), LEFT_S[1]),
            )

    async def catch_up(self) -> None:
        """Wait (2 s at most) until the view holds all that stood in the log at this call.

        Callers share the looks at the ends. Raises BrokerUnavailable, and as `check_whole`.
        """
        await self._catching()
        self.check_whole()

    async def read_commands(self) -> None:
        """Wait (2 s at most) until the view holds every command that stood in the log at this call.

        Without an answer of the broker, and while this gateway catches up at its start, the view stays as it is. Raises
        BrokerUnavailable when the view is behind.
        """
        if self._caught_up and time.monotonic() >= self._commands_after_s:
            await self._reading_commands()

    async def _read_commands(self) -> None:
        tp = (self._settings.names.control, 0)
        try:
            ends = await self._threads.ends.run(admin.end_offsets, self._settings, [tp], CATCH_UP_S)
        except (BrokerUnavailable, NotFound):
            self._commands_after_s = time.monotonic() + ASK_AGAIN_S
            return
        await self._ends.reach(ends, CATCH_UP_S)

    async def _catch_up(self, deadline_s: float) -> None:
        if self._watch.is_old:
            try:
                async with asyncio.timeout(deadline_s):
                    await self._watch.look()
            except TimeoutError as error:
                raise BrokerUnavailable("the broker does not answer; try again", retry_after_s=1) from error
        ends = await self._ends.of_now(deadline_s)
        if not self._caught_up:
            self._progress.goal = ends
        await self._ends.reach(ends, deadline_s)


def _public_reason(error: PenstockError) -> str:
    """Why a lookup of the topics failed, in words for a probe, which needs no key."""
    if isinstance(error, MissingTopics):
        return str(error)
    return "the broker refuses this client" if isinstance(error, Forbidden) else "the broker does not answer"
