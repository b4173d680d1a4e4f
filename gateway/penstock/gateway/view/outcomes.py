"""Outcomes of requests that ended long ago, read from the result topic by offset when somebody asks for one.

The view's file holds facts and that offset; a copy of every output would be the whole topic once more at each gateway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from penstock.common.background import BackgroundTasks
from penstock.common.log_records import LogRecords
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.outputs import LargeOutput, OutcomeReader
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, Gone, InternalError, PenstockError, RegistryUnavailable
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""So long a caller waits for the broker."""
REGISTRY_RETRY_S = 0.1
MOST_WANTED = 10_000
"""Outcomes that are asked for at once; while the broker is away, those of clients that left count too."""


class Outcomes:
    """Used on one event loop. Records are read on a thread, which begins with the first that is asked for.

    Who follows a stream that has ended comes by `Streams.load`.
    """

    def __init__(self, settings: KafkaSettings, codec: Codec, view: View) -> None:
        self._settings = settings
        self._view = view
        self._read_outcome = OutcomeReader(codec)
        self._records = LogRecords(settings, MOST_WANTED)
        self._tasks = BackgroundTasks(ends_process=False)
        view.streams.load = self._load

    async def stop(self) -> None:
        await self._tasks.cancel()
        await self._records.stop()

    @property
    def read(self) -> int:
        """Records that were read again."""
        return self._records.fetched

    async def whole(self, entry: Entry, patience_s: float = PATIENCE_S) -> Entry:
        """The entry with its outcome, if it has ended and is not erased.

        Raises Gone when the topic does not hold the outcome any more, or it was erased meanwhile; BrokerUnavailable,
        RegistryUnavailable, and Overloaded when as many outcomes as may be are asked for.
        """
        held = self._view.in_memory(entry.key)
        if held is not None and held.done:
            entry = held
        if not entry.lacks_outcome or entry.erased:
            return entry
        tp, offset = (self._settings.names.result, entry.place), entry.terminal_offset
        give_up = time.monotonic() + patience_s
        message = await self._fetch(tp, offset, patience_s)
        found = None if message is None else await self._decode(message, give_up)
        if found is None or (found[0].tenant, found[0].request_id, found[0].kind) != (*entry.key, "terminal"):
            raise Gone("the outcome of this request is not on the result topic any more")
        newest = self._view.known.peek(entry.key) or entry
        if newest.erased:
            raise Gone("this request was erased")
        if newest.done and not newest.lacks_outcome:
            return newest
        if entry.lacks_outcome:
            event, large, record_bytes = found
            entry.hold_outcome(event, large, record_bytes)
            self._view.known.keep(entry)
        return entry

    async def message(self, entry: Entry) -> RawMessage | None:
        """The record of its outcome; None when it has not ended, or the topic holds the record no more.

        Raises BrokerUnavailable, Overloaded.
        """
        if not entry.done:
            return None
        return await self._fetch((self._settings.names.result, entry.place), entry.terminal_offset)

    async def request_message(self, entry: Entry) -> RawMessage | None:
        """The first record of the request itself; None when its topic holds it no more. Raises as `message`."""
        origin = entry.first_record
        if origin is None:
            return None
        return await self._fetch((origin.topic, origin.partition), origin.offset)

    async def all_whole(self, entries: Sequence[Entry], patience_s: float) -> list[Entry]:
        """The entries, with those outcomes that could be read."""
        lacking = [entry for entry in entries if entry.lacks_outcome]
        if not lacking:  # the most usual by far: a page of a hundred must not make a hundred tasks
            return list(entries)
        found = await asyncio.gather(*(self.whole(entry, patience_s) for entry in lacking), return_exceptions=True)
        read = dict[Key, Entry | BaseException](zip((entry.key for entry in lacking), found, strict=True))
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, PenstockError):
                raise one
        shown: list[Entry] = []
        for entry in entries:
            one = read.get(entry.key, entry)
            if not isinstance(one, BaseException):
                shown.append(one)
            elif not isinstance(one, Gone) or not (self._view.known.peek(entry.key) or entry).erased:
                shown.append(entry)
        return shown

    async def _fetch(self, tp: TP, offset: int, patience_s: float = PATIENCE_S) -> RawMessage | None:
        try:
            async with asyncio.timeout(patience_s):
                return await self._records.read(tp, offset)
        except TimeoutError as error:
            raise BrokerUnavailable("the broker does not give this outcome; try again", retry_after_s=1) from error

    async def _decode(self, message: RawMessage, give_up: float) -> tuple[ResultEvent, LargeOutput | None, int] | None:
        """None for what is no record of ours: the topic was made anew."""
        record = message.value or b""
        while True:
            try:
                return (*self._read_outcome(record), len(record))
            except RegistryUnavailable:
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(REGISTRY_RETRY_S)
            except PenstockError:
                return None

    def _load(self, entry: Entry) -> None:
        self._tasks.start(self._load_for_readers(entry), f"outcome {entry.request_id}")

    async def _load_for_readers(self, entry: Entry) -> None:
        try:
            found: Entry | PenstockError = await self.whole(entry)
        except PenstockError as error:
            found = error
        except Exception:  # who waits must hear something, and those who come later must not wait behind them
            logger.exception("outcome.not_read request_id=%s", entry.request_id)
            found = InternalError("the outcome could not be read")
        self._view.streams.loaded(entry, found)
