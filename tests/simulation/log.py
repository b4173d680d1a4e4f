"""Kafka as far as the product relies on it: partitions, append times, a group coordinator, committed offsets.

`tests/integration/simulation` runs the same operations on a real broker and compares the histories.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

TP = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """A record on the log."""

    offset: int
    append_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Partition:
    """Offsets from 0; None where there is no record: a transaction's marker, or one that retention took."""

    def __init__(self) -> None:
        self.slots: list[Stored | None] = []
        self.start = 0
        """Nothing below is on the log any more."""
        self.cuts: list[int] = []
        """Where the log has lost its end, each time: a leader epoch ends there."""

    @property
    def end(self) -> int:
        return len(self.slots)

    def append(
        self, now_ms: int, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]] = ()
    ) -> Stored:
        stored = Stored(len(self.slots), now_ms, key, value, tuple(headers))
        self.slots.append(stored)
        return stored

    def marker(self) -> None:
        """A transaction ended: an offset without a record."""
        self.slots.append(None)

    def delete(self, offset: int) -> None:
        self.slots[offset] = None

    def lose_beginning(self, start: int) -> None:
        """Retention, or a person, has deleted what stood below `start`."""
        self.start = max(self.start, start)
        self.slots[: self.start] = [None] * self.start

    def lose_end(self, end: int) -> None:
        """The broker has lost what was appended at `end` and after it."""
        del self.slots[end:]
        self.start = min(self.start, end)
        self.cuts.append(end)

    def at(self, offset: int) -> Stored | None:
        """The record there, if there is one."""
        return self.slots[offset] if offset < self.end else None

    def refuses(self, position: int, cuts_known: int) -> bool:
        """Whether a consumer that has read up to `position`, when so many cuts had been, has read what is lost now."""
        return position > self.end or any(cut < position for cut in self.cuts[cuts_known:])

    def read(self, start: int, most: int) -> tuple[int, list[Stored]]:
        """Records from `start`, and the position after them; a consumer passes over offsets without a record."""
        end = min(start + most, len(self.slots))
        return end, [slot for slot in self.slots[start:end] if slot is not None]


@dataclass(slots=True)
class Member:
    """A member of the group as its coordinator knows it."""

    member_id: str
    topics: tuple[str, ...]
    generation: int = -1
    assigned: tuple[TP, ...] = ()


class UnknownMember(Exception):
    """The coordinator has thrown the member out: its session ran out, or it left."""


class IllegalGeneration(Exception):
    """The member speaks of a generation that is over."""


class Log:
    """All topics, and one consumer group with its offsets. No time passes in here: callers say when."""

    def __init__(self, topics: Mapping[str, int]) -> None:
        self.partitions: dict[TP, Partition] = {
            (topic, number): Partition() for topic, count in topics.items() for number in range(count)
        }
        self.counts = dict(topics)
        self.group = Group(self)

    def add_partitions(self, topic: str, count: int) -> None:
        """The topic has so many from now on; what is there stays where it is."""
        for number in range(self.counts[topic], count):
            self.partitions[(topic, number)] = Partition()
        self.counts[topic] = count

    def append(
        self, tp: TP, now_ms: int, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes]] = ()
    ) -> Stored:
        return self.partitions[tp].append(now_ms, key, value, headers)


@dataclass(slots=True)
class Group:
    """The coordinator of one group with the range assignor."""

    log: Log
    generation: int = 0
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    offsets: dict[TP, tuple[int, str]] = field(default_factory=dict[TP, tuple[int, str]])
    rejoining: set[str] = field(default_factory=set[str])
    """Members that must still join for the rebalance under way to end."""
    rebalancing: bool = False
    on_commit: Callable[[TP, tuple[int, str]], None] = lambda tp, offset: None
    _joined: int = 0

    def join(self, topics: tuple[str, ...], member_id: str | None = None, client_id: str = "m") -> str:
        """Join, or join again; a rebalance begins, or goes on. Raises UnknownMember."""
        if member_id is None:
            self._joined += 1
            member_id = f"{client_id}-{self._joined:04}"
            self.members[member_id] = Member(member_id, topics)
            self.prepare()
        elif member_id not in self.members:
            raise UnknownMember(member_id)
        elif not self.rebalancing:
            self.prepare()
        self.rejoining.discard(member_id)
        return member_id

    def prepare(self) -> None:
        """A rebalance begins: every member has to join again."""
        if self.rebalancing:
            return
        self.rebalancing = True
        self.rejoining = set(self.members)

    def remove(self, member_id: str) -> None:
        """It left, or its session ran out."""
        if self.members.pop(member_id, None) is None:
            return
        self.rejoining.discard(member_id)
        self.prepare()
        if not self.members:  # the generation of an empty group counts too
            self.complete()

    def complete(self) -> bool:
        """The rebalance ends if all have joined; whether it did."""
        if not self.rebalancing or self.rejoining:
            return False
        self.rebalancing = False
        self.generation += 1
        for member, assigned in zip(self._ordered(), self._ranges(), strict=True):
            member.generation = self.generation
            member.assigned = assigned
        return True

    def _ordered(self) -> list[Member]:
        return [self.members[name] for name in sorted(self.members)]

    def _ranges(self) -> list[tuple[TP, ...]]:
        """Per topic consecutive partitions to the members in order, the first ones getting one more if need be."""
        members = self._ordered()
        shares: list[list[TP]] = [[] for _ in members]
        for topic in sorted({topic for member in members for topic in member.topics}):
            each, more = divmod(self.log.counts[topic], len(members))
            number = 0
            for place, share in enumerate(shares):
                count = each + (place < more)
                share.extend((topic, number + at) for at in range(count))
                number += count
        return [tuple(share) for share in shares]

    def commit(self, member_id: str, generation: int, offsets: Mapping[TP, tuple[int, str]]) -> None:
        """Store offsets with their metadata. Raises UnknownMember, IllegalGeneration."""
        if member_id not in self.members:
            raise UnknownMember(member_id)
        if generation != self.generation:
            raise IllegalGeneration(f"{generation}, the group is at {self.generation}")
        for tp, offset in offsets.items():
            self.offsets[tp] = offset
            self.on_commit(tp, offset)

    def committed(self, tps: Sequence[TP]) -> dict[TP, tuple[int, str]]:
        """What is committed; nothing for a partition that has no offset."""
        return {tp: self.offsets[tp] for tp in tps if tp in self.offsets}


def header(record: Stored, name: str) -> bytes | None:
    return next((value for key, value in record.headers if key == name), None)
