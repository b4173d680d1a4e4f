"""Records read again by offset: what a worker has parked, what a gateway holds the offset of. On one thread.

Two handles share the work. The sparse one asks Kafka for one byte at a time, which brings exactly one record batch: it
serves what stands alone. The dense one fetches more at once and reads ranges through. `refetch_plan` decides.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.common.reader import RawMessage, make_consumer, raw_message
from penstock.common.refetch_parts import ActiveRange, Handle, KeptRecords, Outcome, RefetchStats
from penstock.common.refetch_plan import Wants
from penstock.common.settings import KafkaSettings
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

DENSE_FETCH_BYTES = 32 << 10
"""What the dense handle fetches at once; so much again may be prefetched behind a range in vain."""
MAX_ACTIVE = 8
"""Partitions that are read at once; the others wait, the more urgent first."""
SILENCE_S = 5.0
"""A handle that reads and hears nothing for so long is made again: see `KafkaLog`."""
END_PATIENCE_S = 5.0
"""An offset at or behind the end is gone after so long: a new leader may know of less for a moment."""
ASK_AGAIN_S = 0.5
IDLE_S = 1.0
PARKED_S = 0.2
"""How long a partition stays assigned without a range: the next request is mostly for what follows."""
DENSE_AT = 8
"""A range of so many records is read densely when it follows what was read last."""
KEPT_BYTES = 8 << 20
"""Records that came along unasked for are kept within so many bytes, all partitions together."""

_PARTITION_EOF = KafkaError._PARTITION_EOF  # pyright: ignore[reportPrivateUsage]


class Refetcher:
    """`request` and `cancel` belong to the event loop; `on_fetched` and `on_gone` run there, partition by partition.

    Each requested offset is reported once, as fetched or as gone, unless its partition is cancelled before. A broker
    that is away is waited for. That an offset still holds the same request is for the caller to compare.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        loop: asyncio.AbstractEventLoop,
        on_fetched: Callable[[TP, list[RawMessage]], None],
        on_gone: Callable[[TP, list[int]], None],
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._on_fetched = on_fetched
        self._on_gone = on_gone
        self._sparse = Handle({"fetch.message.max.bytes": 1})
        self._dense = Handle({"fetch.message.max.bytes": DENSE_FETCH_BYTES})
        self._wants: dict[TP, Wants] = {}
        self._reached: dict[TP, int] = {}
        self._kept = KeptRecords(KEPT_BYTES)
        self._refused: dict[TP, tuple[float, float]] = {}
        self._lives: dict[TP, int] = {}
        self._life_read: dict[TP, int] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._outcomes: dict[TP, Outcome] = {}
        self._fetched = self._gone = self._bytes_needed = 0
        self._thread = threading.Thread(target=self._run, name="refetch", daemon=True)

    # -- on the event loop

    def start(self) -> None:
        self._thread.start()

    def request(self, tp: TP, offsets: Iterable[int], urgency: int = 0) -> None:
        """Read these offsets; those of a lower `urgency` first."""
        wanted, life = list(offsets), self._lives.setdefault(tp, 0)
        self._command(lambda: self._want(tp, life, wanted, urgency))

    def cancel(self, tp: TP) -> None:
        """Forget what was requested of this partition: from now on nothing of it is reported."""
        self._lives[tp] = self._lives.get(tp, 0) + 1
        self._command(lambda: self._forget(tp))

    async def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, 10.0)

    def stats(self) -> RefetchStats:
        return RefetchStats(
            fetched=self._fetched,
            gone=self._gone,
            bytes_needed=self._bytes_needed,
            bytes_read=self._sparse.bytes_read + self._dense.bytes_read,
            wanted=sum(len(wants) for wants in list(self._wants.values())),
        )

    def _command(self, command: Callable[[], None]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _tell(self, life_and_outcomes: list[tuple[TP, int, Outcome]]) -> None:
        for tp, life, outcome in life_and_outcomes:
            if self._lives.get(tp) != life:
                continue
            if outcome.fetched:
                self._on_fetched(tp, outcome.fetched)
            if outcome.gone and self._lives.get(tp) == life:
                self._on_gone(tp, outcome.gone)

    # -- on the thread

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._pass()
            except Exception:  # whatever librdkafka raises: what is wanted is asked for again, with new consumers
                logger.exception("refetch.failed")
                for handle in (self._sparse, self._dense):
                    self._renew(handle)
                with self._wake:
                    self._wake.wait_for(lambda: self._stopping, 0.5)
        for handle in (self._sparse, self._dense):
            self._close(handle)

    def _pass(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._start_ranges()
        self._hand_over()
        reading = [handle for handle in (self._sparse, self._dense) if handle.active]
        if not reading:
            self._idle()
            return
        for handle in reading:
            # Both share the thread: the wait for one must not hold up the other for long.
            self._read(handle, 0.01 if len(reading) == 1 else 0.002)
        self._hand_over()

    def _idle(self) -> None:
        soon = self._sparse.idle or self._dense.idle or self._refused
        with self._wake:
            self._wake.wait_for(lambda: bool(self._commands) or self._stopping, PARKED_S if soon else IDLE_S)
        for handle in (self._sparse, self._dense):
            if handle.consumer is not None and not self._commands:
                handle.consumer.poll(0)  # serves the statistics

    def _want(self, tp: TP, life: int, offsets: list[int], urgency: int) -> None:
        self._life_read[tp] = life
        wants = self._wants.get(tp)
        if wants is None:
            wants = self._wants[tp] = Wants()
        unread: list[int] = []
        for offset in offsets:
            message = self._kept.take(tp, offset)
            if message is None:
                unread.append(offset)
            else:
                self._say_fetched(tp, message)
        wants.add(unread, urgency)

    def _forget(self, tp: TP) -> None:
        self._wants.pop(tp, None)
        self._outcomes.pop(tp, None)
        self._reached.pop(tp, None)
        self._refused.pop(tp, None)
        self._kept.forget(tp)
        for handle in (self._sparse, self._dense):
            handle.active.pop(tp, None)
            self._unassign(handle, tp)

    def _start_ranges(self) -> None:
        """Give the places that are free to the most urgent partitions, and let go of what is not read on."""
        now = time.monotonic()
        places = MAX_ACTIVE - len(self._sparse.active) - len(self._dense.active)
        if places > 0:
            waiting = [
                (wants.first() or (0, 0), tp)
                for tp, wants in self._wants.items()
                if wants and tp not in self._sparse.active and tp not in self._dense.active
                if self._refused.get(tp, (now, now))[1] <= now
            ]
            for _, tp in sorted(waiting)[:places]:
                self._start_range(tp)
        for handle in (self._sparse, self._dense):
            for tp in [
                tp for tp, since in handle.idle.items() if now - since >= PARKED_S or tp in self._other(handle).active
            ]:
                self._unassign(handle, tp)

    def _start_range(self, tp: TP) -> None:
        wants = self._wants[tp]
        chosen = wants.next_range()
        if chosen is None:
            return
        sizes, reached = wants.sizes, self._reached.get(tp, -1)
        ahead = chosen.start - reached if 0 <= reached <= chosen.start else None
        follows = ahead is not None and ahead <= sizes.max_gap()
        dense = chosen.span * sizes.record_bytes > 2 * DENSE_FETCH_BYTES or (
            follows and len(chosen.offsets) >= DENSE_AT
        )
        handle = self._dense if dense else self._sparse
        if not handle.active:
            handle.heard_at = time.monotonic()
        idle = handle.idle.pop(tp, None) is not None
        if idle and ahead is not None and ahead <= (sizes.max_gap() if dense else sizes.batch_records):
            handle.active[tp] = ActiveRange(chosen, reached, positioned=False)  # it is read on from where it stands
        else:
            handle.active[tp] = ActiveRange(chosen, chosen.start)
            self._position(handle, tp, chosen.start, assigned=idle)

    def _other(self, handle: Handle) -> Handle:
        return self._dense if handle is self._sparse else self._sparse

    def _position(self, handle: Handle, tp: TP, offset: int, *, assigned: bool) -> None:
        consumer = self._consumer(handle)
        if assigned:
            consumer.incremental_unassign([TopicPartition(*tp)])
        consumer.incremental_assign([TopicPartition(*tp, offset)])

    def _unassign(self, handle: Handle, tp: TP) -> None:
        handle.idle.pop(tp, None)
        if handle.consumer is None:
            return
        try:
            handle.consumer.incremental_unassign([TopicPartition(*tp)])
        except KafkaException:  # it was not assigned
            logger.debug("refetch.not_assigned tp=%s", tp)

    def _consumer(self, handle: Handle) -> Consumer:
        if handle.consumer is None:
            handle.consumer = make_consumer(
                self._settings,
                fetch_wait_ms=10,
                buffer_kbytes=1024,
                overrides={
                    **handle.config,
                    "queued.min.messages": 1,  # prefetching is mostly in vain here
                    "fetch.queue.backoff.ms": 1,
                    "statistics.interval.ms": 1000,
                    "stats_cb": handle.note_statistics,
                },
            )
        return handle.consumer

    def _read(self, handle: Handle, timeout_s: float) -> None:
        consumer = self._consumer(handle)
        first = consumer.poll(timeout_s)
        now = time.monotonic()
        if first is not None:
            handle.heard_at = now
            messages: dict[TP, list[Message]] = {}
            for message in (first, *consumer.consume(500, 0)):
                messages.setdefault((message.topic() or "", message.partition() or 0), []).append(message)
            for tp, batch in messages.items():
                self._take(handle, tp, batch, now)
        elif now - handle.heard_at > SILENCE_S and not all(active.eof_since for active in handle.active.values()):
            logger.warning("refetch.silent partitions=%d", len(handle.active))
            self._renew(handle)
        for tp, active in list(handle.active.items()):
            if active.eof_since is not None and now - active.eof_since > END_PATIENCE_S:
                self._give_up(handle, tp, active)

    def _take(self, handle: Handle, tp: TP, messages: list[Message], now: float) -> None:
        active, wants = handle.active.get(tp), self._wants.get(tp)
        if active is None or wants is None:
            self._keep_prefetched(handle, tp, messages)
            return
        records = 0
        size_bytes = 0
        for message in messages:
            offset, error = message.offset() or 0, message.error()
            if error is not None:
                if error.code() == _PARTITION_EOF:
                    self._pass_by(tp, active, wants, offset)
                    active.eof_since = active.eof_since or now
                else:
                    logger.warning("refetch.error tp=%s error=%s", tp, error)
                continue
            if offset < active.position:
                self._refuse(handle, tp, active, now)
                return
            records += 1
            size_bytes += self._take_record(tp, active, wants, message, offset)
        if records:
            active.eof_since = None
            self._refused.pop(tp, None)
            wants.sizes.saw_records(records, size_bytes)
            if active.positioned and handle is self._sparse:
                wants.sizes.saw_batch(records)
            active.positioned = False
        if not active.rest:
            del handle.active[tp]
            handle.idle[tp] = now
            self._reached[tp] = active.position

    def _keep_prefetched(self, handle: Handle, tp: TP, messages: list[Message]) -> None:
        """What came behind the last range: it is kept, and nothing more is prefetched."""
        if tp in handle.idle:
            for message in messages:
                if message.error() is None:
                    offset = message.offset() or 0
                    self._kept.put(tp, offset, message)
                    self._reached[tp] = offset + 1
            self._unassign(handle, tp)

    def _take_record(self, tp: TP, active: ActiveRange, wants: Wants, message: Message, offset: int) -> int:
        """Its size in bytes."""
        self._pass_by(tp, active, wants, offset)
        active.position = offset + 1
        size_bytes = len(message)
        if offset in wants:
            wants.discard(offset)
            self._say_fetched(tp, message)
        else:
            self._kept.put(tp, offset, message)
        if active.rest and active.range.offsets[active.resolved] == offset:
            active.resolved += 1
        return size_bytes

    def _pass_by(self, tp: TP, active: ActiveRange, wants: Wants, offset: int) -> None:
        """What the range has below `offset` did not come: it was deleted, compacted, or is a transaction's marker."""
        offsets = active.range.offsets
        while active.resolved < len(offsets) and offsets[active.resolved] < offset:
            self._say_gone(tp, wants, offsets[active.resolved])
            active.resolved += 1

    def _say_fetched(self, tp: TP, message: Message) -> None:
        self._fetched += 1
        self._bytes_needed += len(message)
        self._outcomes.setdefault(tp, Outcome()).fetched.append(raw_message(message))

    def _say_gone(self, tp: TP, wants: Wants, offset: int) -> None:
        if offset in wants:
            self._gone += 1
            wants.discard(offset)
            self._outcomes.setdefault(tp, Outcome()).gone.append(offset)

    def _refuse(self, handle: Handle, tp: TP, active: ActiveRange, now: float) -> None:
        """The position was behind the log's end, so librdkafka began again at the log's beginning: ask again later."""
        since, _ = self._refused.get(tp, (now, now))
        if now - since > END_PATIENCE_S:
            self._refused.pop(tp, None)
            self._give_up(handle, tp, active)
        else:
            self._refused[tp] = (since, now + ASK_AGAIN_S)
            del handle.active[tp]
            self._unassign(handle, tp)

    def _give_up(self, handle: Handle, tp: TP, active: ActiveRange) -> None:
        """The rest of the range is not in the log."""
        for offset in active.rest:
            self._say_gone(tp, self._wants[tp], offset)
        del handle.active[tp]
        self._unassign(handle, tp)

    def _renew(self, handle: Handle) -> None:
        """A new consumer; the ranges are chosen again."""
        self._close(handle)
        handle.active.clear()
        handle.idle.clear()
        self._reached.clear()

    def _close(self, handle: Handle) -> None:
        consumer, handle.consumer = handle.consumer, None
        handle.bytes_read_before = handle.bytes_read
        if consumer is not None:
            consumer.close()

    def _hand_over(self) -> None:
        if not self._outcomes:
            return
        told = [(tp, self._life_read.get(tp, 0), outcome) for tp, outcome in self._outcomes.items()]
        self._outcomes = {}
        try:
            self._loop.call_soon_threadsafe(self._tell, told)
        except RuntimeError:
            logger.debug("refetch.loop_closed")
