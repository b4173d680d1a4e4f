"""The commit gate: which offsets may be acknowledged, which arrivals are repeats, which partitions should pause.

Work finishes out of order, offsets must be committed in order. The gate holds every delivered offset and releases
handles only from the unfinished head of each partition. `docs/decisions/0001` tells why Faust's own bookkeeping cannot
be used for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

TP = tuple[str, int]
WorkKey = tuple[str, int, int]


class Arrival(Enum):
    """What a delivered record is to this worker."""

    NEW = auto()  # to be worked on
    HELD = auto()  # redelivery of what is in flight here: the newer handle replaced the held one
    FINISHED = auto()  # its outcome is durable already: nothing to do but `take_acks`
    DUPLICATE = auto()  # the same request at another offset while the first is held: ends silently with it
    FOREIGN = auto()  # of a partition that is not assigned: to be ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class Revocation:
    """What an assignment takes away: unfinished work to let go of, silently. `restart_all`: of every partition."""

    dropped: tuple[WorkKey, ...]
    restart_all: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class GateStats:
    """A snapshot. `held` counts entries of the commit span, finished or not."""

    generation: int
    inflight: int
    held: int
    partitions: int
    paused: int


class _Entry:
    __slots__ = ("done", "duplicates", "epoch", "first", "handle", "request_id")

    def __init__(self, handle: Any, request_id: str, epoch: int) -> None:
        self.handle = handle
        self.request_id = request_id
        self.epoch = epoch
        self.done = False
        self.first: WorkKey | None = None  # set on a duplicate: the work that it waits for
        self.duplicates: list[WorkKey] = []


class _Partition:
    __slots__ = ("entries", "finished", "last")

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}  # in offset order
        self.finished: dict[int, str] = {}  # offset → request id of durable outcomes, oldest first, bounded
        self.last = -1


class CommitGate:
    """One worker's offsets.

    `inflight_cap` gives each class (pause at, resume at) on all work in flight, so that lower classes can stop earlier;
    `commit_span` bounds the held entries of one partition; `classes` maps topics to classes.
    """

    def __init__(
        self,
        *,
        inflight_cap: Mapping[str, tuple[int, int]],
        commit_span: int,
        classes: Mapping[str, str],
    ) -> None:
        if any(resume > pause for pause, resume in inflight_cap.values()):
            raise ValueError("a class must resume at or below the count at which it pauses")
        self._caps = dict(inflight_cap)
        self._span = commit_span
        self._classes = dict(classes)
        self._partitions: dict[TP, _Partition] = {}
        self._by_request: dict[str, WorkKey] = {}
        self._ready: list[Any] = []
        self._paused: frozenset[TP] = frozenset()
        self.generation = -1
        self.inflight = 0

    def assign(self, tps: Collection[TP], generation: int, *, fenced: bool = False) -> Revocation:
        """A new assignment under a new generation of the group.

        Unfinished entries of partitions that are gone are dropped. When the member was fenced, or generations are
        missing between the old and the new one, others may have owned any partition meanwhile and begun what was
        finished here under a higher epoch: all is dropped, and finished work is forgotten.
        """
        first = self.generation < 0
        restart_all = not first and (fenced or generation != self.generation + 1)
        self.generation = generation
        kept: dict[TP, _Partition] = {}
        dropped: list[WorkKey] = []
        for tp, partition in self._partitions.items():
            if tp in tps and not restart_all:
                kept[tp] = partition
                continue
            for offset, entry in partition.entries.items():
                if not entry.done and entry.first is None:
                    dropped.append((*tp, offset))
                    self.inflight -= 1
                    self._by_request.pop(entry.request_id, None)
        self._partitions = {tp: kept.get(tp) or _Partition() for tp in tps}
        self._ready.clear()
        self._paused = frozenset()  # pause flags of the consumer die with the assignment
        for key in dropped if not restart_all else ():
            self._release_orphans(key)
        return Revocation(dropped=tuple(dropped), restart_all=restart_all)

    def _release_orphans(self, gone: WorkKey) -> None:
        """Duplicates of work that moved away end silently: its new owner writes the outcome."""
        for tp, partition in self._partitions.items():
            for entry in partition.entries.values():
                if entry.first == gone:
                    entry.done = True
            self._ready += self._drain(partition, tp)

    def arrive(self, tp: TP, offset: int, request_id: str, handle: Any) -> Arrival:
        """A delivered record. `request_id` must name the request within all tenants."""
        partition = self._partitions.get(tp)
        if partition is None:
            return Arrival.FOREIGN
        entry = partition.entries.get(offset)
        if entry is not None and entry.request_id == request_id:
            entry.handle = handle
            return Arrival.DUPLICATE if entry.first is not None and not entry.done else Arrival.HELD
        if partition.finished.get(offset) == request_id:
            return self._finished_again(tp, partition, offset, request_id, handle)
        if entry is not None:  # the topic was made anew: another record stands at this offset now
            self._forget(tp, offset, entry)
        return self._hold(tp, partition, offset, request_id, handle)

    def _hold(self, tp: TP, partition: _Partition, offset: int, request_id: str, handle: Any) -> Arrival:
        entry = _Entry(handle, request_id, self.generation)
        self._insert(partition, offset, entry)
        partition.finished.pop(offset, None)
        key = (*tp, offset)
        first = self._by_request.get(request_id)
        if first is not None and first != key:
            entry.first = first
            self._partitions[first[:2]].entries[first[2]].duplicates.append(key)
            return Arrival.DUPLICATE
        self._by_request[request_id] = key
        self.inflight += 1
        return Arrival.NEW

    def _finished_again(self, tp: TP, partition: _Partition, offset: int, request_id: str, handle: Any) -> Arrival:
        """The commit of a durable outcome was lost in a rebalance: acknowledge again, in order."""
        head = next(iter(partition.entries), None)
        if head is None or offset < head:
            self._ready.append(handle)
        else:
            entry = _Entry(handle, request_id, self.generation)
            entry.done = True
            self._insert(partition, offset, entry)
        return Arrival.FINISHED

    @staticmethod
    def _insert(partition: _Partition, offset: int, entry: _Entry) -> None:
        behind = next(reversed(partition.entries), -1)
        partition.entries[offset] = entry
        if offset < behind:
            partition.entries = dict(sorted(partition.entries.items()))

    def _forget(self, tp: TP, offset: int, entry: _Entry) -> None:
        if not entry.done and entry.first is None:
            self.inflight -= 1
            self._by_request.pop(entry.request_id, None)
            self._release_orphans((*tp, offset))
        self._partitions[tp].entries.pop(offset, None)

    def complete(self, tp: TP, offset: int) -> list[Any]:
        """The outcome is durable. Handles to acknowledge now, in offset order per partition; none if not owned."""
        partition = self._partitions.get(tp)
        entry = None if partition is None else partition.entries.get(offset)
        if partition is None or entry is None or entry.done or entry.first is not None:
            return []
        entry.done = True
        self.inflight -= 1
        self._by_request.pop(entry.request_id, None)
        touched = {tp: partition}
        for topic, number, at in entry.duplicates:
            other = self._partitions.get((topic, number))
            twin = None if other is None else other.entries.get(at)
            if other is not None and twin is not None and twin.first == (*tp, offset):
                twin.done = True
                touched[(topic, number)] = other
        acks: list[Any] = []
        for where, owned in touched.items():
            acks += self._drain(owned, where)
        return acks

    def _drain(self, partition: _Partition, tp: TP) -> list[Any]:
        """Handles of the finished head, which leave the commit span."""
        acks: list[Any] = []
        entries = partition.entries
        while entries:
            offset = next(iter(entries))
            entry = entries[offset]
            if not entry.done:
                break
            del entries[offset]
            acks.append(entry.handle)
            partition.finished[offset] = entry.request_id
            if len(partition.finished) > self._span:
                del partition.finished[next(iter(partition.finished))]
        return acks

    def take_acks(self) -> list[Any]:
        """Handles that an arrival or an assignment made ready (redelivered finished work, orphans), once."""
        if not self._ready:
            return []
        ready, self._ready = self._ready, []
        return ready

    def epoch_of(self, tp: TP, offset: int) -> int | None:
        """The generation in which a held record arrived as new; None when it is not held."""
        partition = self._partitions.get(tp)
        entry = None if partition is None else partition.entries.get(offset)
        return None if entry is None else entry.epoch

    def owns(self, tp: TP) -> bool:
        return tp in self._partitions

    def held(self, tp: TP) -> int:
        """Entries of a partition between its unfinished head and the newest arrival."""
        partition = self._partitions.get(tp)
        return 0 if partition is None else len(partition.entries)

    def pauses(self) -> frozenset[TP]:
        """The partitions that should be paused now; two watermarks keep it from flapping."""
        found: set[TP] = set()
        for tp, partition in self._partitions.items():
            pause_at, resume_at = self._caps[self._classes.get(tp[0], "medium")]
            paused = tp in self._paused
            span_limit = self._span * 3 // 4 if paused else self._span
            if self.inflight >= (resume_at if paused else pause_at) or len(partition.entries) >= span_limit:
                found.add(tp)
        self._paused = frozenset(found)
        return self._paused

    def stats(self) -> GateStats:
        return GateStats(
            generation=self.generation,
            inflight=self.inflight,
            held=sum(len(partition.entries) for partition in self._partitions.values()),
            partitions=len(self._partitions),
            paused=len(self._paused),
        )
