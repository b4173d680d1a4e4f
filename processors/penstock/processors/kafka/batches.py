"""What the group's consumer hands over: records in batches, and assignments of partitions with their generation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.common.reader import Headers
from penstock.schemas.topics import TP

Committed = tuple[int, str]
"""(offset, metadata), as a commit carries it."""


class DeliveredRecord(NamedTuple):
    """A record as it is in the log. `headers` is empty when one of their names is not UTF-8."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    headers_readable: bool


class Batch:
    """Consecutive records of one partition: all that is in the log from `start` to `end`, `end` excluded.

    Offsets in that range without a record hold a transaction's marker, or were compacted or deleted. A batch may have
    no records at all. `taken` gives its room back to the consumer: only a few batches are handed over at a time.
    """

    __slots__ = ("_give_room_back", "end", "generation", "partition", "records", "start", "topic")

    def __init__(
        self,
        tp: TP,
        start: int,
        end: int,
        generation: int,
        records: Sequence[DeliveredRecord],
        give_room_back: Callable[[], None] | None = None,
    ) -> None:
        self.topic, self.partition = tp
        self.start = start
        self.end = end
        self.generation = generation
        self.records = records
        self._give_room_back = give_room_back

    @property
    def tp(self) -> TP:
        return self.topic, self.partition

    def taken(self) -> None:
        """May be called more than once."""
        give_room_back, self._give_room_back = self._give_room_back, None
        if give_room_back is not None:
            give_room_back()

    def __repr__(self) -> str:
        return f"Batch({self.topic}/{self.partition} [{self.start}, {self.end}) records={len(self.records)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One generation of the group as this member sees it.

    `committed` has every assigned partition: where there was no commit, the first offset of the log was committed
    before. `fenced` is True when this member was thrown out, or missed a generation: others may have worked on its
    partitions.
    """

    partitions: frozenset[TP]
    generation: int
    fenced: bool
    committed: Mapping[TP, Committed]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionProgress:
    """Where the intake of one partition stands: the end of what was handed over, and the end of the log.

    `highwater` is None while the broker has not reported it. `paused` says that the partition is held.
    """

    position: int
    highwater: int | None
    paused: bool
