"""Pieces of streams read again from the log, when a client comes to a stream that was passed over.

What is wanted of a partition at a time and stands close together is read in one go: when a gateway dies, its clients
come together. What reaches far back is read by itself, after that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from confluent_kafka import Message

from penstock.common import admin
from penstock.common.background import BackgroundTasks
from penstock.common.reader import PartitionReader, read_ranges
from penstock.common.settings import KafkaSettings
from penstock.gateway.threads import Threads
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.streams import Streams, Wanted
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, PenstockError, RegistryUnavailable
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

READ_S = 60.0
RETRY_S = 0.5
CLOSE_RECORDS = 50_000
"""Streams that began within so many records are read together: a quarter of a second."""
AT_ONCE = 200
"""Streams that are read together, at most."""

Task = tuple[int, bool]
"""A partition, and whether streams that have ended are read: they have tasks of their own."""


class PieceReader:
    """On the event loop; pieces are read and folded on threads."""

    def __init__(
        self, settings: KafkaSettings, codec: Codec, streams: Streams, reader: PartitionReader, threads: Threads
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._streams = streams
        self._reader = reader
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self.read_again = 0
        """Pieces that were read a second time."""
        self._wanted: dict[Task, dict[Key, Wanted]] = {}
        self._reading: set[Task] = set()
        self._tasks = BackgroundTasks()
        streams.read = self._want

    async def stop(self) -> None:
        self._stopping = True
        await self._tasks.cancel()

    def _want(self, wanted: Wanted) -> None:
        task = (wanted.partition, wanted.end is not None)
        self._wanted.setdefault(task, {})[wanted.key] = wanted
        if task not in self._reading:
            self._reading.add(task)
            self._tasks.start(self._read_all(task), f"pieces of partition {wanted.partition}")

    async def _read_all(self, task: Task) -> None:
        tp, one_by_one = (self._settings.names.result, task[0]), False
        try:
            while wanted := [one for one in self._wanted.pop(task, {}).values() if self._streams.is_wanted(one)]:
                chosen = wanted[:1] if one_by_one else close_together(wanted)
                left = [one for one in wanted if one not in chosen]
                try:
                    await self._read_these(tp, chosen)
                except PenstockError as error:
                    logger.warning("pieces.not_read partition=%d error=%s", tp[1], error.code)
                    await asyncio.sleep(RETRY_S)
                    left += chosen
                    one_by_one = True  # what cannot be read must not keep the others
                except Exception:
                    logger.exception("pieces.failed partition=%d", tp[1])
                    left += self._without_culprit(chosen)
                    one_by_one = True
                self._wanted[task] = {one.key: one for one in left} | self._wanted.get(task, {})
        finally:
            self._reading.discard(task)

    def _without_culprit(self, chosen: Sequence[Wanted]) -> Sequence[Wanted]:
        """Requests to be tried again: for one that fails by itself the outcome says so."""
        if len(chosen) > 1:
            return chosen
        self._streams.filled(chosen[0], fold_of(chosen[0]))
        return ()

    async def _read_these(self, tp: TP, wanted: Sequence[Wanted]) -> None:
        told_from = await self._told_from(tp)
        folds, count = await self._threads.pieces.run(self._read, tp, wanted, told_from)
        self.read_again += count
        for one in wanted:
            try:
                self._streams.filled(one, folds[one.key])
            except Exception:  # one stream must not hold up the others
                logger.exception("pieces.failed partition=%d", tp[1])

    async def _told_from(self, tp: TP) -> int:
        """The offset from which on every piece of the streams that are followed now is selected for the view."""
        told: asyncio.Future[int] = self._loop.create_future()

        def tell() -> None:
            at = self._reader.positions().get(tp, 0)
            self._loop.call_soon_threadsafe(lambda: None if told.done() else told.set_result(at))

        self._reader.call(tell)
        return await told

    def _read(self, tp: TP, wanted: Sequence[Wanted], told_from: int) -> tuple[Mapping[Key, ResultFold], int]:
        """The fold of each stream, and how many pieces that took. Raises BrokerUnavailable, RegistryUnavailable."""
        folds = {one.key: fold_of(one) for one in wanted}
        ranges = {one.key: (one.begin, told_from if one.end is None else one.end) for one in wanted}
        keys = {one.key[1].encode() for one in wanted}
        count = 0

        def take(message: Message) -> bool:
            nonlocal count
            if self._stopping:
                raise BrokerUnavailable("the gateway stops", retry_after_s=1)
            if message.key() not in keys:
                return False
            offset = message.offset() or 0
            event = self._piece(message.value() or b"", offset)
            if event is not None and (event.tenant, event.request_id) in folds:
                begin, end = ranges[event.tenant, event.request_id]
                if begin <= offset < end:
                    folds[event.tenant, event.request_id].apply(event, offset)
                    count += 1
            return False

        first, last = admin.begin_offsets(self._settings, [tp])[tp], admin.end_offsets(self._settings, [tp])[tp]
        begin = max(first, min(begin for begin, _ in ranges.values()))
        # The log may have lost its end, or have been made anew.
        end = min(last, max(end for _, end in ranges.values()))
        read_ranges(self._settings, {tp: (begin, end)}, time.monotonic() + READ_S, keep=take)
        return folds, count

    def _piece(self, record: bytes, offset: int) -> ResultEvent | None:
        try:
            event = self._codec.decode(record, ResultEvent)
        except RegistryUnavailable:
            raise
        except PenstockError as error:
            logger.debug("pieces.skipped offset=%d error=%s", offset, error.code)
            return None
        return event if event.kind == "chunk" else None


def fold_of(wanted: Wanted) -> ResultFold:
    """What takes its pieces: of the record that its readers follow, though another's stand before them."""
    tenant, request_id = wanted.key
    fold = ResultFold(request_id, tenant)
    fold.origin = wanted.origin
    return fold


def close_together(wanted: Sequence[Wanted]) -> list[Wanted]:
    """Those to be read next in one go: the one that began last, and those that began not long before it."""
    latest = max(wanted, key=lambda one: one.begin)
    close = [one for one in wanted if latest.begin - one.begin <= CLOSE_RECORDS]
    return sorted(close, key=lambda one: -one.begin)[:AT_ONCE]
