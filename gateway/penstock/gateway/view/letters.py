"""The dead letters that lie on their topic, counted by reason: an operator alerts on what is there, not on what came.

Retention removes letters from the front of the log, so that they are counted by partition, in the order of the log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from penstock.common import admin
from penstock.common.labels import BoundedLabel
from penstock.common.reader import PartitionReader, RawMessage, raw_message
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import DeadLetter
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

MOST = 10_000
"""Letters that are counted: the newest, an equal share of each partition. A gateway that starts reads them all, and the
records that they keep."""
REASONS = 64
LOOK_S = 30.0
"""Between two looks at what retention has removed."""
ASK_S = 10.0
UNREADABLE = "unreadable"


class Letters:
    """Counts. Read by any thread, changed by one."""

    def __init__(self, most: int) -> None:
        """`most`: letters of a partition that are counted, the newest."""
        self._most = most
        self._label = BoundedLabel(REASONS)
        self._by_partition: dict[TP, deque[tuple[int, str]]] = {}
        self._counts = Counter[str]()

    def add(self, tp: TP, offset: int, reason: str) -> None:
        """A letter stands at this offset. Those that stood there or behind it are gone: the log is new, or was cut."""
        letters = self._by_partition.setdefault(tp, deque())
        while letters and letters[-1][0] >= offset:
            self._counts[letters.pop()[1]] -= 1
        label = self._label.of(reason)
        letters.append((offset, label))
        self._counts[label] += 1
        if len(letters) > self._most:
            self._counts[letters.popleft()[1]] -= 1

    def expired(self, firsts: Mapping[TP, int]) -> None:
        """The logs begin at these offsets now."""
        for tp, letters in self._by_partition.items():
            while letters and letters[0][0] < firsts.get(tp, 0):
                self._counts[letters.popleft()[1]] -= 1

    def counts(self) -> dict[str, int]:
        """By reason; a reason of which no letter is left stays, with 0."""
        return dict(self._counts)


class LetterReader:
    """Follows the topic of dead letters on a thread of its own."""

    def __init__(self, kafka: KafkaSettings, codec: Codec) -> None:
        self._kafka, self._codec = kafka, codec
        self._letters = Letters(MOST)
        self._reader: PartitionReader | None = None
        self._look_at = time.monotonic() + LOOK_S

    def start(self) -> None:
        """Read the newest letters, and go on. Raises NotFound for a missing topic, BrokerUnavailable."""
        topic = self._kafka.names.dlq
        partitions = self._partitions()
        share = MOST // max(1, len(partitions))
        self._letters = Letters(share)
        firsts = admin.begin_offsets(self._kafka, partitions, ASK_S)
        ends = admin.end_offsets(self._kafka, partitions, ASK_S)
        begin = {tp: max(firsts[tp], ends[tp] - share) for tp in partitions}
        self._reader = PartitionReader(
            self._kafka,
            begin,
            "beginning",
            self._on_batch,
            poll_s=0.5,
            tells_ends=False,
            select=lambda messages: [raw_message(message, {topic}) for message in messages],
            on_idle=self._on_idle,
            name="penstock-letters",
        )
        self._reader.start()

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.stop()

    def counts(self) -> dict[str, int]:
        """Letters by reason; nothing once reading has ended, since counts would be false from then on."""
        failed = self._reader is None or self._reader.failure is not None
        return {} if failed else self._letters.counts()

    def _partitions(self) -> list[TP]:
        topic = self._kafka.names.dlq
        count = admin.partition_counts(self._kafka, [topic], ASK_S).get(topic, 0)
        return [(topic, number) for number in range(count)]

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        for message in messages:
            self._letters.add((message.topic, message.partition), message.offset, self._reason(message.value))

    def _reason(self, value: bytes | None) -> str:
        try:
            return self._codec.decode(value or b"", DeadLetter).reason_code
        except PenstockError:
            return UNREADABLE

    def _on_idle(self) -> None:
        if time.monotonic() < self._look_at or self._reader is None:
            return
        self._look_at = time.monotonic() + LOOK_S
        try:
            partitions = self._partitions()
            firsts = admin.begin_offsets(self._kafka, partitions, ASK_S)
        except PenstockError as error:
            logger.info("letters.not_looked_at error=%s", error)  # the broker is away: it is asked again
            return
        self._letters.expired(firsts)
        self._reader.add_partitions({tp: first for tp, first in firsts.items() if tp not in self._reader.positions()})
