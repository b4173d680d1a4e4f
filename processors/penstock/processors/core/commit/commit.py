"""The owner of offsets: which may be committed, which arrivals are repeats, which partitions are full.

Work finishes out of order, offsets are committed in order. `Commit` knows every delivered offset of the partitions that
are assigned. It names the unfinished head of each one as the offset to commit, and says in the commit's metadata what
is done above it (`donemap`). `docs/decisions/0001` says why Faust's own bookkeeping cannot be used for that.

Promises:

- A record is below a proposed offset, or done in its map, only when `complete` was called for it, for the first record
  of its request, or an assignment or a delivery showed that nobody has to work on it.
- A proposed offset is never below what the broker has. A repeat never becomes work beside its first record.
- After an assignment that may have let others work here, nothing that was finished here counts.

State: for each assigned partition what the broker has, its unfinished records, and a flag and a mark for each offset
(`span`). Events: `assign`, `delivered`, `arrive`, `leaves`, `complete`, `committed`. It emits no effects: the answers
are `Arrival`, `Revocation`, and what `commits`, `full` and `lags_below` say. `check` has the invariants.
Its other parts are imported from here alone, but for the format of the done map.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from penstock.processors.core.commit.span import CommitSpan, GapInDelivery, mark_of
from penstock.schemas.topics import TP

__all__ = ["Arrival", "Commit", "DuplicateNotDelivered", "GapInDelivery", "Revocation"]

WorkKey = tuple[str, int, int]

FARTHEST_BEHIND = 20_000
"""A record that stays unfinished farther behind lags: the done map of a commit reaches hardly farther."""


class DuplicateNotDelivered(Exception):
    """A duplicate must become work, and no delivery will bring its record: the worker has to begin again."""


class Arrival(Enum):
    """What a delivered record is to this worker."""

    NEW = auto()  # to be worked on
    HELD = auto()  # redelivery of what is in flight here
    FINISHED = auto()  # its outcome is durable already: nothing to do
    DUPLICATE = auto()  # the same request at another offset while the first is held: ends silently with it
    FOREIGN = auto()  # of a partition that is not assigned: to be ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class Revocation:
    """What an assignment takes away: unfinished work to drop silently. `restart_all`: of every partition."""

    dropped: tuple[WorkKey, ...]
    restart_all: bool


class _Entry:
    """An unfinished record."""

    __slots__ = ("duplicates", "first", "key", "mark", "request_id")

    def __init__(self, key: WorkKey, request_id: str, mark: int, first: _Entry | None) -> None:
        self.key = key
        self.request_id = request_id
        self.mark = mark
        self.first = first  # set on a duplicate: the work that it waits for
        self.duplicates: list[_Entry] | None = None


class _Partition:
    """`committed` and `metadata` are what the broker has; `proposed` is what it should have, None when not computed."""

    __slots__ = ("committed", "entries", "metadata", "proposed", "span")

    def __init__(self, committed: int, metadata: str) -> None:
        self.committed = committed
        self.metadata = metadata
        self.span = CommitSpan(committed, metadata)
        self.entries: dict[int, _Entry] = {}  # unfinished, by offset
        self.proposed: tuple[int, str] | None = None

    def propose(self) -> tuple[int, str]:
        if self.proposed is None:
            self.proposed = (self.span.head, self.span.done_map())
        return self.proposed


class Commit:
    """`commit_span` bounds how far deliveries may run ahead of a partition's unfinished head."""

    def __init__(self, *, commit_span: int) -> None:
        self._commit_span = commit_span
        self._partitions: dict[TP, _Partition] = {}
        self._by_request: dict[str, _Entry] = {}
        self._changed: set[TP] = set()  # partitions whose commit may be due
        self.generation = -1
        self.inflight = 0

    def assign(self, committed: Mapping[TP, tuple[int, str]], generation: int, *, fenced: bool = False) -> Revocation:
        """A new assignment in a new generation of the group, with the broker's offset and metadata of each partition.

        Unfinished work of partitions that are gone is dropped. When the member was fenced, or generations are missing
        between the old and the new one, others may have owned any partition meanwhile and begun what was finished here
        under a higher epoch: all is dropped, and only what the broker's done maps say is known to be finished.
        """
        restart_all = self.generation >= 0 and (fenced or generation != self.generation + 1)
        self.generation = generation
        kept: dict[TP, _Partition] = {}
        dropped: list[_Entry] = []
        for tp, partition in self._partitions.items():
            if tp in committed and not restart_all:
                kept[tp] = partition
            else:
                dropped += (entry for _, entry in sorted(partition.entries.items()) if entry.first is None)
        self._partitions = {tp: _kept(kept.get(tp), offset, text) for tp, (offset, text) in committed.items()}
        self._changed = set(kept)
        for entry in dropped:
            self._drop(entry)
        for partition in kept.values():
            partition.span.recede(partition.entries)
        return Revocation(dropped=tuple(entry.key for entry in dropped), restart_all=restart_all)

    def _drop(self, entry: _Entry) -> list[WorkKey]:
        """The work ends without an outcome of ours. Returns where its duplicates were, which are forgotten.

        They are new work when they are delivered again, for readers may follow them and not what was dropped.
        """
        self.inflight -= 1
        del self._by_request[entry.request_id]
        forgotten = _held_duplicates(self._partitions, entry)
        for partition, duplicate in forgotten:
            del partition.entries[duplicate.key[2]]
            partition.span.abandon(duplicate.key[2])
        return [duplicate.key for _, duplicate in forgotten]

    def _replace(self, entry: _Entry) -> None:
        """Another record is at the offset of this work now: the topic was made again.

        Such a record comes with the deliveries that follow an assignment, and they bring each duplicate too. Raises
        DuplicateNotDelivered when one of them came before this record.
        """
        for key in self._drop(entry):
            tp, offset = key[:2], key[2]
            begun = entry.key[2] if tp == entry.key[:2] else self._partitions[tp].span.brought
            if offset < begun:
                raise DuplicateNotDelivered(f"{key} waited for {entry.key}, which is another request now")

    def _finish(self, tp: TP, partition: _Partition, entry: _Entry) -> None:
        offset = entry.key[2]
        del partition.entries[offset]
        partition.span.finish(offset, entry.mark)
        partition.proposed = None
        self._changed.add(tp)

    def delivered(self, tp: TP, start: int, end: int, offsets: Sequence[int]) -> None:
        """The consumer has delivered [start, end), with records at these offsets, ascending; it comes before `arrive`.

        Offsets between them have no record (markers of transactions, compaction) and count as done. A record that was
        delivered holds the commit back until it has arrived and is complete, however late it arrives. `start` is the
        consumer's position before the delivery. Raises GapInDelivery when that is beyond the end of the last delivery,
        or below what the broker had at the assignment.
        """
        partition = self._partitions.get(tp)
        if partition is None:
            return
        span = partition.span
        redelivered = start < span.end
        span.deliver(start, end, offsets)
        if redelivered and len(offsets) != end - start:
            for offset in partition.entries:  # it is worked on, though its record is gone from the log
                if start <= offset < end:
                    span.reopen(offset)
        span.forget(partition.committed, self._commit_span)
        partition.proposed = None
        self._changed.add(tp)

    def arrive(self, tp: TP, offset: int, request_id: str | None, *, leaves: bool = False) -> Arrival:
        """A delivered record. `request_id` names the request within all tenants; None: nobody can read the record.

        `leaves`: the record belongs on another partition, and the same request there is no repeat. Partitions may be
        added between two deliveries of a record: it keeps the name under which it arrived first.
        Raises GapInDelivery for what no delivery covers, DuplicateNotDelivered.
        """
        partition = self._partitions.get(tp)
        if partition is None:
            return Arrival.FOREIGN
        if request_id is None:
            name = f"poison {(*tp, offset)}"
        else:
            name = _leaving(tp, offset) if leaves else request_id
        span, mark = partition.span, mark_of(name)
        if span.finished(offset, mark):
            return Arrival.FINISHED
        entry = partition.entries.get(offset)
        if entry is not None or span.done(offset):
            former = _other_name(tp, offset, request_id, leaves=leaves)
            if entry is None:
                if former is not None and span.finished(offset, mark_of(former)):
                    return Arrival.FINISHED
            elif entry.request_id in (name, former):
                return Arrival.HELD if entry.first is None else Arrival.DUPLICATE
            else:
                del partition.entries[offset]  # the topic was made again: another record is at this offset now
                if entry.first is None:
                    self._replace(entry)
        return self._hold(tp, partition, offset, name, mark)

    def _hold(self, tp: TP, partition: _Partition, offset: int, request_id: str, mark: int) -> Arrival:
        first = self._by_request.get(request_id)
        entry = _Entry((tp[0], tp[1], offset), request_id, mark, first)
        partition.entries[offset] = entry
        partition.span.reopen(offset)
        if first is None:
            self._by_request[request_id] = entry
            self.inflight += 1
            return Arrival.NEW
        if first.duplicates is None:
            first.duplicates = []
        first.duplicates.append(entry)
        return Arrival.DUPLICATE

    def leaves(self, tp: TP, offset: int) -> None:
        """Held work is written to another partition: from now on the same request elsewhere is no repeat of it."""
        entry, name = self._partitions[tp].entries[offset], _leaving(tp, offset)
        del self._by_request[entry.request_id]
        entry.request_id, entry.mark = name, mark_of(name)
        self._by_request[name] = entry

    def complete(self, tp: TP, offset: int) -> None:
        """The outcome is durable. Nothing happens for what is not held here, or is a duplicate."""
        partition = self._partitions.get(tp)
        entry = None if partition is None else partition.entries.get(offset)
        if partition is None or entry is None or entry.first is not None:
            return
        self.inflight -= 1
        del self._by_request[entry.request_id]
        self._finish(tp, partition, entry)
        if entry.duplicates is not None:
            for where, duplicate in _held_duplicates(self._partitions, entry):
                self._finish(duplicate.key[:2], where, duplicate)

    def commits(self) -> dict[TP, tuple[int, str]]:
        """What the broker should have and has not: the offset of the unfinished head and the done map above it.

        It says the same again until `committed` is called. An offset below what the broker has is never among it.
        """
        due: dict[TP, tuple[int, str]] = {}
        for tp in list(self._changed):
            partition = self._partitions[tp]
            offset, text = partition.propose()
            if offset < partition.committed or (offset, text) == (partition.committed, partition.metadata):
                self._changed.discard(tp)
            else:
                due[tp] = (offset, text)
        return due

    def committed(self, tp: TP, offset: int, metadata: str) -> None:
        """The broker has it. What is below is not delivered again, so it need not be known any more."""
        partition = self._partitions.get(tp)
        if partition is None or offset < partition.committed:
            return
        partition.committed, partition.metadata = offset, metadata
        partition.span.forget(offset, self._commit_span)

    def partitions(self) -> Collection[TP]:
        return self._partitions.keys()

    def offsets(self) -> dict[TP, int]:
        """Of each assigned partition the offset that the broker has as committed."""
        return {tp: partition.committed for tp, partition in self._partitions.items()}

    def full(self, tp: TP) -> bool:
        """Whether the partition should deliver no more for now."""
        partition = self._partitions.get(tp)
        return partition is not None and partition.span.reached - partition.span.head >= self._commit_span

    def lags_below(self, tp: TP) -> int:
        """Unfinished records of a partition at this offset or below hold back its commit for too long."""
        partition = self._partitions.get(tp)
        reached = 0 if partition is None else partition.span.reached
        return reached - max(1, min(self._commit_span // 2, FARTHEST_BEHIND))

    def check(self) -> None:
        """The invariants, for tests and the simulator."""
        firsts = {
            entry.request_id: entry
            for partition in self._partitions.values()
            for entry in partition.entries.values()
            if entry.first is None
        }
        assert firsts == self._by_request, "each held request has one first record, and is known by its name"
        assert len(firsts) == self.inflight, f"{self.inflight} in flight, {len(firsts)} held"
        for tp, partition in self._partitions.items():
            span = partition.span
            # What was delivered before an assignment may arrive and end after it: then the head passes `reached`.
            assert max(span.head, span.reached) <= span.end, f"{tp}: {span.head}, {span.reached}, {span.end}"
            for offset, entry in partition.entries.items():
                assert offset < span.end, f"{tp} {offset} is held, and was not delivered"
                assert not span.done(offset), f"{tp} {offset} is held and done"
                first = entry.first
                assert first is None or firsts.get(first.request_id) is first, f"{tp} {offset} waits for nothing"


def _leaving(tp: TP, offset: int) -> str:
    """Names a record that leaves this worker."""
    return f"moved {(*tp, offset)}"


def _other_name(tp: TP, offset: int, request_id: str | None, *, leaves: bool) -> str | None:
    """Under which a record may have arrived before partitions were added."""
    return request_id if leaves or request_id is None else _leaving(tp, offset)


def _held_duplicates(partitions: Mapping[TP, _Partition], entry: _Entry) -> list[tuple[_Partition, _Entry]]:
    held: list[tuple[_Partition, _Entry]] = []
    for duplicate in entry.duplicates or ():
        partition = partitions.get(duplicate.key[:2])
        if partition is not None and partition.entries.get(duplicate.key[2]) is duplicate:
            held.append((partition, duplicate))
    return held


def _kept(partition: _Partition | None, committed: int, metadata: str) -> _Partition:
    """A partition that stays keeps what is known of it; the broker's offset never falls in our view."""
    if partition is None:
        return _Partition(committed, metadata)
    if committed >= partition.committed:
        partition.committed, partition.metadata = committed, metadata
    partition.span.resume(committed)
    for offset in partition.entries:  # it is worked on, though its offset is committed
        if offset < committed:
            partition.span.reopen(offset)
    partition.proposed = None
    return partition
