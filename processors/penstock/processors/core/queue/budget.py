"""The intake's memory: who may keep how much of what was fetched and has not ended.

Three eighths are for *bodies*, the bytes of records that are near their turn. They are divided evenly among the pairs
of class and lane, so that a model that is dead fills its own share and no other. A record that finds no room in its
share is parked: only its *fact* stays, and its bytes are read again when its turn comes. One eighth is for the bytes of
those that end while they are parked, which are read again for their outcomes.

The other half is for facts. Half of that is guaranteed to the assigned partitions, evenly; the rest is for who comes
first.
"""

from __future__ import annotations

from collections.abc import Collection

from penstock.schemas.topics import TP

CLASSES_OF_A_LANE = 3
FACT_BYTES = 1_024
"""What a parked request costs in memory, with its places in `Commit` and the scheduler."""

ClassAndLane = tuple[str, str]


class Budget:
    """Counts only. A body larger than its share gets in when its pair has no other, and only one such at a time."""

    def __init__(self, total_bytes: int, fact_bytes: int = FACT_BYTES) -> None:
        self._fact_bytes = fact_bytes
        self.ends_limit = total_bytes // 8
        """Bytes, of parked requests that end. `Rereads` keeps to it."""
        self._bodies_limit = total_bytes // 2 - self.ends_limit
        self._facts_limit = total_bytes // 2 // fact_bytes
        self._lanes: set[str] = set()
        self.pair_share_bytes = self._bodies_limit // CLASSES_OF_A_LANE
        """What each pair of class and lane may keep."""
        self._bodies: dict[ClassAndLane, int] = {}
        self.bodies_bytes = 0
        """Of bodies that are kept."""
        self._large: tuple[ClassAndLane, int] | None = None  # the body that is larger than its share
        self._partitions: frozenset[TP] = frozenset()
        self._facts: dict[TP, int] = {}
        self.facts = 0
        """Requests that are parked or work."""
        self._common_used = 0  # facts beyond the guaranteed ones
        self._partition_share = 0

    # -- bodies

    def register(self, lane: str) -> None:
        """A lane is known from now on, and its classes have their shares. Those of the others become smaller."""
        if lane not in self._lanes:
            self._lanes.add(lane)
            self.pair_share_bytes = self._bodies_limit // (CLASSES_OF_A_LANE * len(self._lanes))

    def try_keep_body(self, klass: str, lane: str, size: int) -> bool:
        """Whether the bytes of this record may stay; if so they are counted until `drop_body`."""
        self.register(lane)
        pair = (klass, lane)
        used = self._bodies.get(pair, 0)
        large = 0 if self._large is None else self._large[1]
        if used + size > self.pair_share_bytes:
            if used or large or self.bodies_bytes > self._bodies_limit:
                return False
            self._large = (pair, size)
        elif self.bodies_bytes - large + size > self._bodies_limit:
            return False  # a new lane has made the shares smaller, and others use more than theirs until they drop some
        self._bodies[pair] = used + size
        self.bodies_bytes += size
        return True

    def keep_body(self, klass: str, lane: str, size: int) -> None:
        """Count the bytes of a record that was read again: its turn or end is near. It stays beyond its share too."""
        pair = (klass, lane)
        self._bodies[pair] = self._bodies.get(pair, 0) + size
        self.bodies_bytes += size

    def room(self, klass: str, lane: str) -> int:
        """Bytes that are free of the share of a class and lane."""
        return max(0, self.pair_share_bytes - self._bodies.get((klass, lane), 0))

    def over_share(self, klass: str, lane: str) -> bool:
        """Whether a class and lane keep more bytes than their share, as records that were read again can."""
        return self._bodies.get((klass, lane), 0) > self.pair_share_bytes

    def drop_body(self, klass: str, lane: str, size: int) -> None:
        """The bytes of a record are not kept any more. Raises ValueError for what was not counted."""
        pair = (klass, lane)
        left = self._bodies.get(pair, 0) - size
        if left < 0:
            raise ValueError(f"{pair} has no {size} bytes")
        self.bodies_bytes -= size
        if left:
            self._bodies[pair] = left
            return
        self._bodies.pop(pair, None)
        if self._large is not None and self._large[0] == pair:
            self._large = None

    # -- facts

    def assign(self, tps: Collection[TP]) -> None:
        """The partitions of a new assignment. Facts of others count, without a guarantee, until they are dropped."""
        self._partitions = frozenset(tps)
        self._partition_share = self._facts_limit // 2 // max(len(self._partitions), 1)
        self._common_used = sum(max(0, count - self._share(tp)) for tp, count in self._facts.items())

    def _share(self, tp: TP) -> int:
        return self._partition_share if tp in self._partitions else 0

    def count_fact(self, tp: TP) -> None:
        """A request is parked or works. It is counted even when the partition is full: it was fetched already."""
        count = self._facts.get(tp, 0)
        if count >= self._share(tp):
            self._common_used += 1
        self._facts[tp] = count + 1
        self.facts += 1

    def drop_fact(self, tp: TP) -> None:
        """A request has ended. Raises ValueError when the partition has none."""
        count = self._facts.get(tp, 0)
        if not count:
            raise ValueError(f"{tp} has no facts")
        if count > self._share(tp):
            self._common_used -= 1
        self.facts -= 1
        if count > 1:
            self._facts[tp] = count - 1
        else:
            del self._facts[tp]

    def full(self, tp: TP) -> bool:
        """Whether the partition should deliver no more for now."""
        if self._facts.get(tp, 0) < self._share(tp):
            return False
        return self._common_used >= self._facts_limit - self._partition_share * len(self._partitions)

    @property
    def used_bytes(self) -> int:
        return self.bodies_bytes + self.facts * self._fact_bytes
