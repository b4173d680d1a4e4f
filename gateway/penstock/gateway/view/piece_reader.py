"""Pieces of streams read again from the log, when a client comes to a stream that was passed over.

All that is wanted of a partition at a time is read in one go: when a gateway dies, its clients come together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping

from penstock.common import admin
from penstock.common.reader import PartitionReader, read_ranges
from penstock.common.settings import KafkaSettings
from penstock.gateway.threads import Threads
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.streams import Piece, Streams, Wanted
from penstock.schemas.codec import Codec
from penstock.schemas.errors import PenstockError, RegistryUnavailable
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

READ_S = 60.0
RETRY_S = 0.5


class PieceReader:
    """On the event loop; the reading itself is done on a thread."""

    def __init__(
        self, settings: KafkaSettings, codec: Codec, streams: Streams, reader: PartitionReader, threads: Threads
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._streams = streams
        self._reader = reader
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self.read_again = 0
        """Pieces that were read a second time."""
        self._wanted: dict[int, dict[Key, Wanted]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        streams.read = self._want

    async def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _want(self, wanted: Wanted) -> None:
        self._wanted.setdefault(wanted.partition, {})[wanted.key] = wanted
        if wanted.partition not in self._tasks:
            self._tasks[wanted.partition] = self._loop.create_task(self._read_all(wanted.partition))

    async def _read_all(self, partition: int) -> None:
        try:
            while self._wanted.get(partition):
                wanted = self._wanted.pop(partition)
                try:
                    await self._read_these(partition, wanted)
                except PenstockError as error:
                    logger.warning("pieces.not_read partition=%d error=%s", partition, error.code)
                    await asyncio.sleep(RETRY_S)
                    later = self._wanted.setdefault(partition, {})
                    for key, one in wanted.items():
                        later.setdefault(key, one)
        finally:
            del self._tasks[partition]

    async def _read_these(self, partition: int, wanted: Mapping[Key, Wanted]) -> None:
        wanted = {key: one for key, one in wanted.items() if self._streams.is_wanted(key)}
        if not wanted:
            return
        tp = (self._settings.names.result, partition)
        held_from = await self._held_from(tp)
        found = await self._threads.pieces.run(self._read, tp, list(wanted.values()), held_from)
        for key, pieces in found.items():
            self.read_again += len(pieces)
            self._streams.filled(key, pieces)

    async def _held_from(self, tp: TP) -> int:
        """The offset from which on this partition's pieces of followed streams are all told to the view."""
        told: asyncio.Future[int] = self._loop.create_future()

        def tell() -> None:
            at = self._reader.positions().get(tp, 0)
            self._loop.call_soon_threadsafe(lambda: None if told.done() else told.set_result(at))

        self._reader.call(tell)
        return await told

    def _read(self, tp: TP, wanted: Iterable[Wanted], held_from: int) -> dict[Key, list[Piece]]:
        """The pieces of each stream. Raises BrokerUnavailable, RegistryUnavailable."""
        first = admin.begin_offsets(self._settings, [tp])[tp]
        begin = max(first, min(one.begin for one in wanted))
        end = max(held_from if one.end is None else one.end for one in wanted)
        keys = {one.key[1].encode() for one in wanted}
        pieces: dict[Key, list[Piece]] = {one.key: [] for one in wanted}
        for message in read_ranges(self._settings, {tp: (begin, end)}, time.monotonic() + READ_S, keys=keys):
            try:
                event = self._codec.decode(message.value or b"", ResultEvent)
            except RegistryUnavailable:
                raise
            except PenstockError as error:
                logger.debug("pieces.skipped offset=%d error=%s", message.offset, error.code)
                continue
            if event.kind == "chunk" and (found := pieces.get((event.tenant, event.request_id))) is not None:
                found.append((event, message.offset))
        return pieces
