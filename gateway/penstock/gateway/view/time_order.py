"""Records of many partitions in the order of their times, as a view that catches up should fold them. Pure.

A k-way merge: a record goes on when each partition that is still behind has come at least as far in time. What is read
ahead waits here, and a partition with much of that is paused.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from penstock.common.reader import RawMessage
from penstock.schemas.topics import TP

BUFFER_BYTES = 32 * 2**20
"""What may wait here, about: a partition is paused when it has more than its share, but not below `SHARE_BYTES`."""
SHARE_BYTES = 64 * 1024
RECORD_BYTES = 500
"""What a record takes beside its value."""
SILENCE_S = 0.5
"""After so long without a record of those that are behind, nobody waits for one that could give some."""
_NEVER = 1 << 63


@dataclass(slots=True)
class _Partition:
    end: int
    """The goal: the offset behind the last record that stood there at the start."""
    outcomes: bool
    is_behind: bool
    """Whether records before the goal are still to be read."""
    read_ms: int = -1
    """The latest time that was read: what is still to be read counts as not older."""
    records: list[RawMessage] = field(default_factory=list[RawMessage])
    times_ms: list[int] = field(default_factory=list[int])
    waiting_bytes: int = 0
    paused: bool = False
    silent: bool = False
    """It has given nothing for long, though it might: perhaps nothing stands before its goal (markers, compaction)."""

    @property
    def holds(self) -> bool:
        """Whether the others wait for it."""
        return self.is_behind and not self.silent


class TimeOrder:
    """`add` what was read, `take` what may be folded. The order of each partition is kept. `now_s` is monotonic."""

    def __init__(
        self,
        begin: Mapping[TP, int],
        ends: Mapping[TP, int],
        outcome_topic: str,
        now_s: float,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """The partitions in `ends` are put in order, up to these offsets; records of others go on at once."""
        self._at_once: list[RawMessage] = []
        self._heard_s = now_s
        self._share = max(SHARE_BYTES, buffer_bytes // max(1, len(ends)))
        # Of records of one time the request comes before its outcome.
        self._partitions = {
            tp: _Partition(end, tp[0] == outcome_topic, begin.get(tp, 0) < end)
            for tp, end in sorted(ends.items(), key=lambda item: item[0][0] == outcome_topic)
        }

    @property
    def done(self) -> bool:
        """Whether all goals are reached and nothing waits here."""
        return not self._at_once and not any(p.is_behind or p.records for p in self._partitions.values())

    def add(self, batch: Sequence[RawMessage], now_s: float) -> None:
        """Take in what was read."""
        for message in batch:
            partition = self._partitions.get((message.topic, message.partition))
            if partition is None:
                self._at_once.append(message)
                continue
            if partition.is_behind:
                self._heard_s = now_s  # what is new elsewhere, all the time, says nothing of those
            partition.read_ms = max(partition.read_ms, message.timestamp_ms)
            partition.records.append(message)
            partition.times_ms.append(partition.read_ms)
            partition.waiting_bytes += _size(message)
            partition.silent = False
            if message.offset + 1 >= partition.end:
                partition.is_behind = False

    def take(self, *, crowded: bool = False) -> list[RawMessage]:
        """What may be folded now, in order.

        `crowded`: so many requests are live that outcomes alone go on, as long as any are behind.
        """
        among: Collection[_Partition] = self._partitions.values()
        if crowded and any(p.holds for p in among if p.outcomes):
            among = [p for p in among if p.outcomes]
        until_ms = min((p.read_ms for p in among if p.holds), default=_NEVER)
        taken = [(-1, message) for message in self._at_once]
        self._at_once.clear()
        for partition in among:
            count = bisect_right(partition.times_ms, until_ms)
            if count:
                taken += zip(partition.times_ms[:count], partition.records[:count], strict=True)
                partition.waiting_bytes -= sum(map(_size, partition.records[:count]))
                del partition.times_ms[:count], partition.records[:count]
        taken.sort(key=itemgetter(0))
        return [message for _, message in taken]

    def to_pause(self) -> list[TP]:
        """Partitions that are read too far ahead; they count as paused from now on."""
        found = [tp for tp, p in self._partitions.items() if not p.paused and p.waiting_bytes > self._share]
        for tp in found:
            self._partitions[tp].paused = True
        return found

    def to_resume(self) -> list[TP]:
        """Paused partitions of which little is left; they count as read from now on."""
        found = [tp for tp, p in self._partitions.items() if p.paused and p.waiting_bytes <= self._share // 4]
        for tp in found:
            self._partitions[tp].paused = False
        return found

    def look_for_silence(self, now_s: float) -> None:
        """When those that are behind give nothing for long, nobody waits for the ones that could, until they do."""
        if now_s - self._heard_s > SILENCE_S:
            for partition in self._partitions.values():
                if partition.is_behind and not partition.paused:
                    partition.silent = True

    def was_held_up(self, now_s: float) -> None:
        """Nothing could be read meanwhile: the time does not count as silence."""
        self._heard_s = now_s

    def finish(self) -> None:
        """The goals are reached, however that was found out: all that waits may go on."""
        for partition in self._partitions.values():
            partition.is_behind = False


def _size(message: RawMessage) -> int:
    return len(message.value or b"") + RECORD_BYTES
