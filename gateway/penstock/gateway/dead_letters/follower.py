"""Follows the topic of dead letters into the index, on a thread of its own, and reads single letters again."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Sequence

from penstock.common import admin
from penstock.common.labels import BoundedLabel
from penstock.common.reader import PartitionReader, RawMessage, make_consumer, read_with
from penstock.common.settings import KafkaSettings
from penstock.gateway.dead_letters.index import LetterIndex
from penstock.gateway.dead_letters.letters import (
    HEADER_KIND,
    PURGED,
    REDRIVEN,
    LetterAction,
    LetterFacts,
    LetterGroup,
    LetterPlace,
    facts_of,
)
from penstock.schemas.codec import Codec
from penstock.schemas.errors import PenstockError, RegistryUnavailable
from penstock.schemas.records import DeadLetterAction
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

REASONS = 64
GROUPS = 200
COUNT_S = 1.0
LOOK_S = 30.0
"""Between two looks at what retention has removed."""
ASK_S = 10.0
RETRY_S = 1.0
_KINDS = frozenset({REDRIVEN.encode(), PURGED.encode()})


class LetterFollower:
    """`index` holds all letters once `caught_up` has returned. The index belongs to its maker."""

    def __init__(self, kafka: KafkaSettings, codec: Codec, index: LetterIndex) -> None:
        self._kafka, self._codec, self.index = kafka, codec, index
        self._reader: PartitionReader | None = None
        self._stopping = threading.Event()
        self._label = BoundedLabel(REASONS)
        self._counts: dict[str, int] = {}
        self._counted_at = 0.0
        self._stale = True
        self._looked_at = time.monotonic()
        self._groups: list[LetterGroup] = []
        self._grouped_at = -COUNT_S
        self._grouping = threading.Lock()

    def start(self) -> None:
        """Go on where the index ends. Raises NotFound for a missing topic, BrokerUnavailable."""
        partitions = self._partitions()
        firsts = admin.begin_offsets(self._kafka, partitions, ASK_S)
        ends = admin.end_offsets(self._kafka, partitions, ASK_S)
        known = self.index.positions()
        begin: dict[TP, int] = {}
        for tp in partitions:
            position = known.get(tp[1], 0)
            if position > ends[tp]:
                self.index.begin_anew(tp[1])
                position = 0
            begin[tp] = max(position, firsts[tp])
        self.index.expired({tp[1]: first for tp, first in firsts.items()})
        self._reader = PartitionReader(
            self._kafka,
            begin,
            self._on_batch,
            poll_s=0.5,
            reports_ends=False,
            on_idle=self._on_idle,
            name="penstock-dead-letters",
        )
        self._reader.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._reader is not None:
            self._reader.stop()

    def counts(self) -> dict[str, int]:
        """Letters that nobody ran again, by reason; nothing once reading has ended: counts would be false then."""
        failed = self._reader is None or self._reader.failure is not None
        return {} if failed else self._counts

    def groups(self) -> list[LetterGroup]:
        """Up to GROUPS groups of letters that nobody ran again, counted once a second for all callers."""
        with self._grouping:
            if time.monotonic() >= self._grouped_at + COUNT_S:
                self._groups, self._grouped_at = self.index.groups(GROUPS), time.monotonic()
            return self._groups

    def catch_up(self, within_s: float) -> None:
        """Wait until the index has all that stands on the topic now. Raises BrokerUnavailable, InternalError."""
        assert self._reader is not None
        self._reader.wait_until_caught_up(within_s)

    def read(self, places: Sequence[LetterPlace], within_s: float = ASK_S) -> dict[LetterPlace, RawMessage]:
        """The records of these letters; one that retention took meanwhile is left out. Raises BrokerUnavailable."""
        topic, give_up = self._kafka.names.dlq, time.monotonic() + within_s
        partitions = {(topic, partition) for partition, _ in places}
        firsts = admin.begin_offsets(self._kafka, partitions, within_s)
        consumer = make_consumer(self._kafka)
        found: dict[LetterPlace, RawMessage] = {}
        try:
            for partition, offset in places:
                tp = (topic, partition)
                if offset >= firsts[tp]:
                    for message in read_with(consumer, {tp: (offset, offset + 1)}, give_up):
                        found[partition, message.offset] = message
        finally:
            consumer.close()
        return found

    def _partitions(self) -> list[TP]:
        topic = self._kafka.names.dlq
        count = admin.partition_counts(self._kafka, [topic], ASK_S).get(topic, 0)
        return [(topic, number) for number in range(count)]

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        while not self._stopping.is_set():
            try:
                self.index.take([self._record(message) for message in messages])
                break
            except (sqlite3.OperationalError, RegistryUnavailable) as error:  # a full disk: the topic keeps what comes
                logger.error("dead_letters.not_written error=%s", error)
                self._stopping.wait(RETRY_S)
        self._stale = True
        self._count()

    def _record(self, message: RawMessage) -> LetterFacts | LetterAction:
        if dict(message.headers).get(HEADER_KIND) in _KINDS:
            try:
                action = self._codec.decode(message.value or b"", DeadLetterAction)
                request_id = None if message.key is None else message.key.decode("utf-8", "replace")
                return LetterAction(message.partition, message.offset, request_id, action)
            except RegistryUnavailable:
                raise
            except PenstockError:
                logger.warning("dead_letters.unreadable_action offset=%d", message.offset)
        return facts_of(message, self._codec)

    def _count(self) -> None:
        now = time.monotonic()
        if self._stale and now >= self._counted_at + COUNT_S:
            self._counted_at, self._stale = now, False
            counts = dict.fromkeys(self._counts, 0)
            for reason, count in self.index.counts().items():
                label = self._label.of(reason)
                counts[label] = counts.get(label, 0) + count
            self._counts = counts

    def _on_idle(self) -> None:
        self._count()
        if time.monotonic() < self._looked_at + LOOK_S or self._reader is None:
            return
        self._looked_at = time.monotonic()
        try:
            firsts = admin.begin_offsets(self._kafka, self._partitions(), ASK_S)
        except PenstockError as error:
            logger.info("dead_letters.not_looked_at error=%s", error)  # the broker is away: it is asked again
            return
        self._reader.add_partitions({tp: first for tp, first in firsts.items() if tp not in self._reader.positions()})
        try:
            self.index.expired({tp[1]: first for tp, first in firsts.items()})
        except sqlite3.OperationalError as error:  # a full disk: the next look comes
            logger.error("dead_letters.not_written error=%s", error)
        self._stale = True
