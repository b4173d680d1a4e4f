"""Records between librdkafka and the worker: which batch is handed over next, and which partitions hold too much.

Pure. More urgent topics go first, but one batch in `FAIR_SHARE` is of the partition that has waited longest, so that a
flood of urgent records does not hide the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice

from penstock.processors.kafka.batches import TP, DeliveredRecord

BATCH_RECORDS = 64
BATCH_BYTES = 1_000_000
FAIR_SHARE = 4
TOTAL_BYTES = 16_000_000
LEAST_PARTITION_BYTES = 65_536
RECORD_OVERHEAD_BYTES = 300
"""What a small record costs in memory beside its key and value."""

Piece = tuple[TP, int, int, list[DeliveredRecord]]
"""(partition, start, end, records)"""


class OffsetsWentBack(Exception):
    """A record stands below what was fetched. A position that the log does not hold is reported, so this is a fault."""


class _Partition:
    __slots__ = ("bytes", "end", "handed", "records", "sizes", "urgency")

    def __init__(self, offset: int, urgency: int) -> None:
        self.records: deque[DeliveredRecord] = deque()
        self.sizes: deque[int] = deque()
        self.bytes = 0
        self.urgency = urgency
        self.handed = offset  # the end of what was handed over
        self.end = offset  # the end of what was fetched


class FetchBuffer:
    """Records per partition, in offset order. `urgency` of a topic: lower is more urgent."""

    def __init__(self, urgency: Callable[[str], int], total_bytes: int = TOTAL_BYTES) -> None:
        self._urgency = urgency
        self._total_bytes = total_bytes
        self._limit = total_bytes
        self._partitions: dict[TP, _Partition] = {}
        self._ready: dict[TP, None] = {}  # what can be handed over, who has waited longest first
        self._turn = 0

    def assign(self, offsets: Mapping[TP, int]) -> None:
        """Forget everything; the next record of each partition is at its offset or behind it."""
        self._partitions = {tp: _Partition(offset, self._urgency(tp[0])) for tp, offset in offsets.items()}
        self._ready.clear()
        self._limit = max(LEAST_PARTITION_BYTES, self._total_bytes // max(1, len(offsets)))

    def add(self, tp: TP, record: DeliveredRecord) -> None:
        """A fetched record. Raises OffsetsWentBack."""
        partition = self._partitions.get(tp)
        if partition is None:
            return
        if record.offset < partition.end:
            raise OffsetsWentBack(f"{tp[0]}/{tp[1]} has a record at {record.offset}, expected was {partition.end}")
        size = len(record.value or b"") + len(record.key or b"") + RECORD_OVERHEAD_BYTES
        partition.records.append(record)
        partition.sizes.append(size)
        partition.bytes += size
        partition.end = record.offset + 1
        self._ready.setdefault(tp)

    def reached_end(self, tp: TP, offset: int) -> None:
        """The log's end is at `offset`: what is missing before it are no records."""
        partition = self._partitions.get(tp)
        if partition is not None and offset > partition.end:
            partition.end = offset
            self._ready.setdefault(tp)

    def ends(self) -> dict[TP, int]:
        return {tp: partition.end for tp, partition in self._partitions.items()}

    def has_any(self, held: frozenset[TP]) -> bool:
        """Whether there is a batch to hand over."""
        return any(tp not in held for tp in self._ready)

    @property
    def empty(self) -> bool:
        return not self._ready

    def take(self, held: frozenset[TP]) -> Piece | None:
        """The records of the next batch; None when there are none but those of held partitions."""
        tp = self._choose(held)
        if tp is None:
            return None
        partition = self._partitions[tp]
        records = self._cut(partition)
        start = partition.handed
        # Behind the last record there may be markers up to the end.
        partition.handed = partition.end if not partition.records else records[-1].offset + 1
        del self._ready[tp]
        if partition.records:
            self._ready[tp] = None
        return tp, start, partition.handed, records

    def _choose(self, held: frozenset[TP]) -> TP | None:
        chosen: TP | None = None
        least = 0
        self._turn += 1
        for tp in self._ready:
            if tp in held:
                continue
            urgency = self._partitions[tp].urgency
            if chosen is None or urgency < least:
                chosen, least = tp, urgency
                if self._turn % FAIR_SHARE == 0:
                    break
        return chosen

    @staticmethod
    def _cut(partition: _Partition) -> list[DeliveredRecord]:
        count = size = 0
        for record_size in islice(partition.sizes, BATCH_RECORDS):
            if count and size + record_size > BATCH_BYTES:
                break
            count, size = count + 1, size + record_size
        for _ in range(count):
            partition.sizes.popleft()
        partition.bytes -= size
        return [partition.records.popleft() for _ in range(count)]

    def pauses(self, paused: frozenset[TP]) -> frozenset[TP]:
        """Which partitions should not be fetched now; two watermarks keep it from flapping."""
        high, low = self._limit, self._limit // 4
        return frozenset(
            tp for tp, partition in self._partitions.items() if partition.bytes >= (low if tp in paused else high)
        )
