"""What other workers have published of a stream before it came to this one, read from the result topic.

A worker that dies in the middle of streams leaves their pieces at the end of the result topic. Once after an
assignment, when the first stream asks, the end of each of its partitions is looked through for the keys of its records.
A request that is not among them has published nothing recently, and begins again. For the others a *claim* is
published: a chunk without text, of this worker's (epoch, attempt). Readers ignore what the other worker writes behind
it. So what is before it never changes: it is read, and folded as every reader does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import Message

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.reader import read_ranges
from penstock.common.settings import KafkaSettings
from penstock.common.threads import in_daemon_thread
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.work import Subject
from penstock.processors.request_spans import LostRun
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, PenstockError
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

READ_S = 20.0
"""What takes longer is given up: the stream begins again."""
GATHER_S = 0.02
"""Streams that are claimed within this time are read together."""
LOOK_BACK_S = 15.0
"""Beyond the session of a worker that died: so long before its death a stream may have said its last word."""
LAST_RECORDS = 2_000
"""So much of each partition is looked through at least: after an outage of all workers nothing recent is there."""
MOST_KEYS = 200_000

Beginning = tuple[TP, int]
"""Where the first record of a key was seen."""
Claim = Callable[[Subject, Callable[[], None]], None]


class PublishedStreams:
    """`claim` publishes a claim, and calls back when the broker has it."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        claim: Claim,
        *,
        look_back_s: float,
        owned_since_ms: Callable[[], float] = now_ms,
        on_lost: Callable[[Subject, Sequence[LostRun]], None] | None = None,
    ) -> None:
        """`on_lost` gets what other runs have published of a stream that is taken over."""
        self._settings = settings
        self._codec = codec
        self._claim = claim
        self._look_back_s = look_back_s
        self._owned_since_ms = owned_since_ms
        self._on_lost = on_lost
        self._epoch = -1
        self._keys: asyncio.Future[dict[bytes, Beginning]] | None = None
        self._reading: list[tuple[Subject, Beginning, asyncio.Future[StreamSoFar | None]]] = []
        self._reader: asyncio.Task[None] | None = None

    async def of(self, subject: Subject) -> PublishedPrefix | None:
        """What stands of its stream, claimed for its present (epoch, attempt); None when it begins again."""
        try:
            async with asyncio.timeout(READ_S):
                begins = (await self._keys_of(subject.epoch)).get(subject.request_id.encode())
                if begins is None:
                    return None
                await self._claimed(subject)
                stream = await self._read(subject, begins)
        except (PenstockError, TimeoutError) as error:
            logger.warning("stream.not_read request_id=%s error=%s", subject.request_id, type(error).__name__)
            return None
        published = None if stream is None else stream.published
        if stream is not None and self._on_lost is not None:
            self._on_lost(subject, list(stream.lost.values()))
        logger.info(
            "stream.taken_over request_id=%s tokens=%d",
            subject.request_id,
            len(published.token_ids) if published else 0,
        )
        return published

    async def _claimed(self, subject: Subject) -> None:
        stands = asyncio.Event()
        self._claim(subject, stands.set)
        await stands.wait()

    def _keys_of(self, epoch: int) -> asyncio.Future[dict[bytes, Beginning]]:
        """The keys at the end of the topic, with where the first record of each stands; looked for once an epoch."""
        if self._keys is None or epoch > self._epoch or _has_failed(self._keys):
            self._epoch, self._keys = epoch, asyncio.ensure_future(in_daemon_thread(self._look))
        return asyncio.shield(self._keys)

    def _look(self) -> dict[bytes, Beginning]:
        give_up = time.monotonic() + READ_S
        result = self._settings.names.result
        count = admin.partition_counts(self._settings, [result]).get(result, 0)
        partitions = [(result, number) for number in range(count)]
        firsts, ends = admin.begin_offsets(self._settings, partitions), admin.end_offsets(self._settings, partitions)
        # From the assignment on: the first stream may ask a long time after it, when its model is loaded.
        since_ms = min(now_ms(), self._owned_since_ms()) - self._look_back_s * 1000
        since = admin.offsets_at(self._settings, partitions, round(since_ms))
        begins = {tp: max(firsts[tp], min(since[tp], ends[tp] - LAST_RECORDS)) for tp in partitions}
        found: dict[bytes, Beginning] = {}

        def note(message: Message) -> bool:
            key: Any = message.key()
            if key is not None and key not in found:
                found[key] = (result, message.partition() or 0), message.offset() or 0
                if len(found) > MOST_KEYS:
                    del found[next(iter(found))]
            return False

        read_ranges(self._settings, {tp: (begins[tp], ends[tp]) for tp in partitions}, give_up, keep=note)
        return found

    def _read(self, subject: Subject, begins: Beginning) -> asyncio.Future[StreamSoFar | None]:
        """Together with others that are claimed at the same time."""
        future: asyncio.Future[StreamSoFar | None] = asyncio.get_running_loop().create_future()
        self._reading.append((subject, begins, future))
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read_all())
        return future

    async def _read_all(self) -> None:
        await asyncio.sleep(GATHER_S)
        while reading := self._reading:
            self._reading = []
            try:
                found = await in_daemon_thread(self._fold, [(subject, begins) for subject, begins, _ in reading])
            except Exception as error:
                logger.warning("stream.not_read streams=%d error=%s", len(reading), type(error).__name__)
                found = {}
            for subject, _, future in reading:
                if not future.done():
                    future.set_result(found.get(subject.request_id.encode()))

    def _fold(self, claimed: Sequence[tuple[Subject, Beginning]]) -> dict[bytes, StreamSoFar]:
        """By the keys of their records. On a thread; raises BrokerUnavailable."""
        streams = {subject.request_id.encode(): StreamSoFar(subject) for subject, _ in claimed}
        begins: dict[TP, int] = {}
        for _, (tp, offset) in claimed:
            begins[tp] = min(offset, begins.get(tp, offset))
        self._apply(streams, begins)
        if cut := {key: stream for key, stream in streams.items() if stream.is_cut}:
            # They began before what was looked through, and not before their requests did.
            since_ms = min(stream.subject.origin.append_time_ms for stream in cut.values())
            again = {key: StreamSoFar(stream.subject) for key, stream in cut.items()}
            self._apply(again, admin.offsets_at(self._settings, list(begins), since_ms))
            streams |= again
        return streams

    def _apply(self, streams: dict[bytes, StreamSoFar], begins: dict[TP, int]) -> None:
        ends = admin.end_offsets(self._settings, begins)

        def take(message: Message) -> bool:
            key: Any = message.key()
            stream = streams.get(key)
            if stream is not None:
                try:
                    stream.apply(self._codec.decode(message.value() or b"", ResultEvent))
                except DecodeError:
                    logger.debug("stream.skipped offset=%d", message.offset() or 0)
            return False

        ranges = {tp: (begin, ends[tp]) for tp, begin in begins.items()}
        read_ranges(self._settings, ranges, time.monotonic() + READ_S, keep=take)


class StreamSoFar:
    """The fold of one stream, with its tokens, and when other runs than the present one published something of it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._fold = ResultFold(subject.request_id, subject.tenant)
        self._fold.origin = subject.origin
        self._tokens: list[int] = []
        self.is_cut = False
        """Whether its first piece was not read."""
        self.lost: dict[tuple[int, int], LostRun] = {}

    def apply(self, event: ResultEvent) -> None:
        fold, since = self._fold, self._fold.since
        self._note(event)
        fold.apply(event)
        if fold.since != since:
            self._tokens, self.is_cut = [], False
        if event.kind != "chunk" or (event.epoch, event.attempt) != fold.place:
            return
        self.is_cut |= fold.gap
        if not event.token_ids:  # of a remote model
            return
        first = event.first_token_index or 0
        if first == len(self._tokens):
            self._tokens += event.token_ids
        elif first > len(self._tokens):
            self.is_cut = True

    def _note(self, event: ResultEvent) -> None:
        place = event.epoch, event.attempt
        if event.origin == self.subject.origin and place < (self.subject.epoch, self.subject.attempt):
            first_ms = self.lost[place].first_ms if place in self.lost else event.created_at
            self.lost[place] = LostRun(*place, event.worker_id, first_ms, event.created_at)

    @property
    def published(self) -> PublishedPrefix | None:
        """None when nothing stands, or not all of it can be known, or the request has ended."""
        fold, subject = self._fold, self.subject
        whole = not (self.is_cut or fold.gap) and fold.terminal is None
        if not whole or not (self._tokens or fold.text) or fold.place != (subject.epoch, subject.attempt):
            return None
        return PublishedPrefix(subject.lane, fold.text, tuple(self._tokens), fold.call_chars, fold.since, fold.logprobs)


def _has_failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
