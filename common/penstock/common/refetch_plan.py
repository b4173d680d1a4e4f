"""Which offsets of one partition to read next, in one go: pure.

Reading through a gap costs its bytes, seeking over it costs about a millisecond, and Kafka always sends whole record
batches. So what stands close together is read as one range, and what stands far apart by itself.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

MAX_WANTED = 256
"""Records of one range at most, so that something more urgent need not wait for long."""
READ_THROUGH_RATIO = 2.5
"""A range may hold so many records for each one that is wanted."""
SEEK_BYTES = 64 << 10
"""A gap of more bytes than this is always worth a seek."""


@dataclass(frozen=True, slots=True)
class Range:
    """Offsets to read in one go, ascending."""

    offsets: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.offsets[0]

    @property
    def span(self) -> int:
        """Records between its ends, the unwanted ones too."""
        return self.offsets[-1] - self.offsets[0] + 1


@dataclass(slots=True)
class RecordSizes:
    """What was learned about a partition's records from those that came."""

    record_bytes: float = 1000.0
    batch_records: float = 1.0

    def saw_records(self, count: int, size_bytes: int) -> None:
        self.record_bytes += (size_bytes / count - self.record_bytes) * min(1.0, count / 50)

    def saw_batch(self, count: int) -> None:
        """The records that came behind a seek, at once: the rest of one batch."""
        self.batch_records += (count - self.batch_records) / 4

    def max_gap(self) -> float:
        """The largest gap, in records, that may be read through."""
        return max(self.batch_records, SEEK_BYTES / self.record_bytes)


class Wants:
    """The wanted offsets of one partition, each with an urgency: the lower, the sooner."""

    def __init__(self) -> None:
        self.sizes = RecordSizes()
        self._urgency: dict[int, int] = {}
        self._first: dict[int, list[int]] = {}
        self._ascending: list[int] = []

    def __len__(self) -> int:
        return len(self._urgency)

    def __contains__(self, offset: int) -> bool:
        return offset in self._urgency

    def add(self, offsets: Iterable[int], urgency: int) -> None:
        """Want these. One that is wanted already becomes more urgent, never less."""
        fresh = [offset for offset in offsets if self._urgency.get(offset, urgency + 1) > urgency]
        self._ascending += [offset for offset in fresh if offset not in self._urgency]
        self._ascending.sort()
        heap = self._first.setdefault(urgency, [])
        for offset in fresh:
            self._urgency[offset] = urgency
            heapq.heappush(heap, offset)

    def discard(self, offset: int) -> None:
        """It came, or it is gone."""
        if self._urgency.pop(offset, None) is not None and len(self._ascending) > 2 * len(self._urgency) + 64:
            self._ascending = sorted(self._urgency)

    def first(self) -> tuple[int, int] | None:
        """(urgency, offset) of what should be read first."""
        for urgency in sorted(self._first):
            heap = self._first[urgency]
            while heap and self._urgency.get(heap[0]) != urgency:
                heapq.heappop(heap)
            if heap:
                return urgency, heap[0]
            del self._first[urgency]
        return None

    def next_range(self) -> Range | None:
        """The first wanted offset and those behind it that are worth reading in the same go, whatever their urgency."""
        first = self.first()
        if first is None:
            return None
        chosen = [first[1]]
        max_gap = self.sizes.max_gap()
        for index in range(bisect_left(self._ascending, first[1] + 1), len(self._ascending)):
            offset = self._ascending[index]
            if offset not in self._urgency or offset == chosen[-1]:
                continue
            gap, span = offset - chosen[-1], offset - chosen[0] + 1
            in_the_same_batch = gap <= self.sizes.batch_records
            if not in_the_same_batch and (gap > max_gap or span > READ_THROUGH_RATIO * (len(chosen) + 1)):
                break
            chosen.append(offset)
            if len(chosen) == MAX_WANTED:
                break
        return Range(tuple(chosen))
