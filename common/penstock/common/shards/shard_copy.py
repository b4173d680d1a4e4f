"""Keeps a file of the shared topic up to date: follows its partitions, and lets readers wait until all is in it."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.kafka_errors import missing_topic
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.shards.partitioning import used_of
from penstock.common.shards.shard_file import ShardFile
from penstock.schemas.errors import BrokerUnavailable, PenstockError
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

STALE_MS = 12 * 3_600_000
"""After so long without following tombstones may be missing: the topic keeps them for a day."""
RETRY_S, TOUCH_S = 1.0, 60.0
BATCH_RECORDS = 5_000

T = TypeVar("T")


class ShardCopy:
    """The records of conversations in the shared topic, as a file. Partitions are followed from their first use on.

    All methods block and are thread-safe. They raise BrokerUnavailable when Kafka or the disk does not let them.
    """

    def __init__(self, settings: KafkaSettings, path: Path, *, clock_ms: Callable[[], int] = now_ms) -> None:
        """Raises NotFound without the shared topic, BrokerUnavailable, Overloaded."""
        self.topic = settings.names.conversation_log
        self._settings = settings
        self._clock_ms = clock_ms
        topic_id = admin.topic_id(settings, self.topic)
        if topic_id is None:
            raise missing_topic(self.topic)
        self.topic_id = topic_id
        self._count = admin.partition_counts(settings, [self.topic])[self.topic]
        self.partitions = used_of(settings, self._count)
        """Those over which conversations are spread. More may have been added since."""
        self.file = ShardFile(path, topic_id, self.partitions)
        self.on_records: Callable[[Sequence[RawMessage]], None] = lambda _: None
        """Called with records that were written to the file, on the copy's thread."""
        self.on_failure: Callable[[str], object] = lambda _: None
        """Called by a reader of a file that is not followed any more; only a new process mends that."""
        self._lock = threading.Lock()
        self._followed: set[int] = set()
        self._followed_ms: dict[int, int] = {}
        self._closing = threading.Event()
        self._touched = 0.0
        self._disk_error: str | None = None
        """Why SQLite does not take what is read now; None again when it does."""
        self._changed: str | None = None
        """How the topic differs from the one that this process began with; None: it does not."""
        self._reader = PartitionReader(
            settings, {}, self._take, batch_size=BATCH_RECORDS, on_idle=self._touch, name="penstock-conversations"
        )
        self._reader.start()

    def close(self) -> None:
        """Stop following. Nobody may read any more."""
        self._closing.set()
        self._reader.stop()
        self.file.close()

    def refresh(self, partitions: Iterable[int], timeout_s: float = 10.0) -> ShardFile:
        """The file, once all is in it that is in these partitions now."""
        if self._reader.failure is not None:
            self.on_failure(f"conversations are not copied any more: {self._reader.failure!r}")
        wanted = [(self.topic, one) for one in sorted(set(partitions))]
        self._follow([partition for _, partition in wanted], timeout_s)
        try:
            self._reader.wait_until_caught_up(timeout_s, partitions=wanted)
        except BrokerUnavailable as error:
            why = self._disk_error or self._how_far(wanted)
            raise BrokerUnavailable(
                f"conversations are being copied from {self.topic}: {why}", retry_after_s=1
            ) from error
        if self._changed is not None:
            raise BrokerUnavailable(self._changed, retry_after_s=5)
        return self.file

    def _how_far(self, wanted: Sequence[TP]) -> str:
        positions = self._reader.positions()
        return ", ".join(f"partition {tp[1]} up to offset {positions.get(tp, 0)}" for tp in wanted)

    @property
    def trouble(self) -> str | None:
        """Why nobody can read now: what the disk says, or how the topic has changed. None: they can."""
        return self._changed or self._disk_error

    @property
    def failure(self) -> BaseException | None:
        """Why nothing is followed any more."""
        return self._reader.failure

    def call(self, action: Callable[[], object]) -> None:
        """Run `action` on the copy's thread, between two batches."""
        self._reader.call(action)

    def refresh_all(self, timeout_s: float = 10.0) -> ShardFile:
        return self.refresh(range(self.partitions), timeout_s)

    def _follow(self, partitions: Sequence[int], timeout_s: float) -> None:
        with self._lock:
            if new := [one for one in partitions if one not in self._followed]:
                places = [(self.topic, one) for one in new]
                first = admin.begin_offsets(self._settings, places, timeout_s)
                end = admin.end_offsets(self._settings, places, timeout_s)
                self._reader.call(
                    partial(self._begin, {one: (first[tp], end[tp]) for one, tp in zip(new, places, strict=True)})
                )
                self._followed |= set(new)

    # -- on the reader's thread, between two batches

    def _begin(self, bounds: Mapping[int, tuple[int, int]]) -> None:
        """Go on where the file ends, if it can be trusted."""
        stand = self._until_done(self.file.positions) or {}
        for partition, (first, end) in bounds.items():
            known = stand.get(partition)
            if known is not None and first <= known.offset <= end and not self._is_stale(known.followed_ms):
                self._followed_ms[partition] = known.followed_ms
                self._reader.seek((self.topic, partition), known.offset)
            else:
                self._begin_anew(partition)

    def _begin_anew(self, partition: int) -> None:
        # Who waits for the end must wait again, before anything is taken away.
        self._reader.seek((self.topic, partition), 0)
        self._followed_ms[partition] = self._clock_ms()
        self._until_done(lambda: self.file.forget(partition))

    def _is_stale(self, followed_ms: int) -> bool:
        return self._clock_ms() - followed_ms > STALE_MS

    def _take(self, batch: Sequence[RawMessage]) -> None:
        stale = {one for one in {message.partition for message in batch} if self._is_stale(self._followed_ms[one])}
        positions = {one.partition: one.offset + 1 for one in batch}
        # Until it is made again the file says that it is stale, also to a process that comes after this one.
        followed_ms = min((self._followed_ms[one] for one in stale), default=self._clock_ms())
        self._until_done(lambda: self.file.apply(batch, positions, followed_ms))
        self._followed_ms |= dict.fromkeys(positions, followed_ms)
        self.on_records(batch)
        self._reader.call(self._touch)  # while some partitions are written to without a pause others are followed too
        for partition in stale:
            logger.warning("conversations.copied_anew partition=%d: it was not followed for long", partition)
            self._reader.call(partial(self._begin_anew, partition))

    def _touch(self) -> None:
        """Note what is followed to its end, also while nothing is written."""
        if time.monotonic() - self._touched < TOUCH_S:
            return
        self._touched = time.monotonic()
        reached = self._reader.positions()
        try:
            self._changed = self._how_changed()
            ends = admin.end_offsets(self._settings, reached)
        except PenstockError as error:
            logger.info("conversations.not_followed error=%s", error.code)
            return
        at_end = {tp[1]: offset for tp, offset in reached.items() if offset >= ends[tp]}
        for partition in [one for one in at_end if self._is_stale(self._followed_ms[one])]:
            del at_end[partition]
            self._begin_anew(partition)
        now = self._clock_ms()
        self._until_done(lambda: self.file.apply((), at_end, now))
        self._followed_ms |= dict.fromkeys(at_end, now)

    def _how_changed(self) -> str | None:
        topic = self.topic
        # A broker that has just started may know no topics yet.
        if admin.topic_id(self._settings, topic) not in (None, self.topic_id):
            return f"{topic} was made anew: start this process again"
        count = admin.partition_counts(self._settings, [topic]).get(topic, self._count)
        if count != self._count:
            # A process that starts now may take all of them, where the conversations are too few to tell.
            if used_of(self._settings, count) != self.partitions:
                return f"{topic} has {count} partitions now, and had {self._count}: start this process again"
            logger.warning("conversations.partitions_added count=%d used=%d", count, self.partitions)
            self._count = count
        return None

    def _until_done(self, work: Callable[[], T]) -> T | None:
        """Do it, again while the disk does not let it: what was read must not be missing in the file.

        None once the copy is closed.
        """
        while not self._closing.is_set():
            try:
                done = work()
            except sqlite3.Error as error:
                if self._disk_error is None:
                    logger.warning("conversations.not_copied error=%s: trying again", error)
                self._disk_error = str(error)
                self._closing.wait(RETRY_S)
            else:
                self._disk_error = None
                return done
        return None
