"""The consumer of one worker: positions, fetches in pieces, what was delivered and is not taken yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.log import TP, Stored

if TYPE_CHECKING:
    from simulation.workers import Life

INBOX_BATCHES = 4
FETCH_RETRY_S = 0.1
MOST_RECORDS = 16


@dataclass(slots=True)
class Batch:
    """Records of [start, end) of a partition, delivered under a generation; `at` of them are taken."""

    tp: TP
    start: int
    end: int
    records: list[Stored]
    generation: int
    at: int = 0
    announced: bool = False


class Consumer:
    """Fetches what it owns and is not held. More urgent topics are taken first."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._cluster = life.cluster
        self._rng = life.world.stream(f"consumer/{life.name}")
        self.positions: dict[TP, int] = {}
        self.ends: dict[TP, int] = {}
        """Up to where it has read in this assignment, also before it went back."""
        self._cuts_known: dict[TP, int] = {}
        self.generation = -1
        self.held: frozenset[TP] = frozenset()
        self._inbox: dict[int, deque[Batch]] = {urgency: deque() for urgency in range(4)}
        self._flying = 0
        self.skipped = False
        """A fault: deliveries were lost on the way, and the position went on."""

    @property
    def inbox(self) -> int:
        return sum(map(len, self._inbox.values()))

    def first(self) -> Batch | None:
        return next((queue[0] for queue in self._inbox.values() if queue), None)

    def put(self, batch: Batch) -> None:
        self._inbox[self._cluster.urgency(batch.tp[0])].append(batch)

    def done(self, batch: Batch) -> None:
        self._inbox[self._cluster.urgency(batch.tp[0])].popleft()

    def clear(self) -> None:
        for queue in self._inbox.values():
            queue.clear()

    def revoked(self) -> None:
        """A rebalance began: nothing more is fetched until it is over."""
        self.positions.clear()
        self.ends.clear()

    def assigned(self, committed: Mapping[TP, tuple[int, str]], generation: int) -> None:
        """Start again at what is committed: what was not taken is delivered again."""
        self.clear()
        self.positions = {tp: offset for tp, (offset, _) in committed.items()}
        self.ends = dict(self.positions)
        self._cuts_known = {tp: len(self._cluster.log.partitions[tp].cuts) for tp in committed}
        self.generation = generation
        self.held = frozenset()
        self._flying = 0

    def hold(self, tps: frozenset[TP]) -> None:
        self.held = tps

    def arm(self) -> None:
        """Fetch, if there is anything to fetch."""
        if self.inbox + self._flying < INBOX_BATCHES and not self._life.stopping and self._is_behind():
            self._life.timer("fetch", self._life.network.latency(), self._fetch)

    def _unread(self) -> Iterator[TP]:
        partitions = self._cluster.log.partitions
        for tp, at in self.positions.items():
            if tp not in self.held and (at < partitions[tp].end or self._refused(tp)):
                yield tp

    def _is_behind(self) -> bool:
        return next(self._unread(), None) is not None

    def _refused(self, tp: TP) -> bool:
        """Whether the log has lost what was read of it."""
        return self._cluster.log.partitions[tp].refuses(self.positions[tp], self._cuts_known[tp])

    @property
    def has_more(self) -> bool:
        """Something is on its way, or is to be fetched."""
        return bool(self.inbox or self._flying or self._is_behind())

    def rewind(self) -> None:
        """It forgets its positions, as after an error, and goes on from what is committed.

        Not where the log has lost what was read: that position is refused first.
        """
        committed = self._cluster.log.group.committed([tp for tp in self.positions if not self._refused(tp)])
        for tp, (offset, _) in committed.items():
            self.positions[tp] = min(offset, self.positions[tp])

    def goes_over_again(self, tp: TP, delivered: int) -> bool:
        """Whether it has yet to read again what it read before, or what was `delivered` before this assignment."""
        if tp in self._life.membership.about_to_read:
            return delivered > 0
        return tp in self.positions and self.positions[tp] < max(delivered, self.ends[tp])

    def _fetch(self) -> None:
        world, network = self._life.world, self._life.network
        behind = list(self._unread())
        if not behind:
            return
        if not network.reachable or world.now < self._cluster.broker_down_until:
            self._life.timer("fetch", FETCH_RETRY_S, self._fetch)
            return
        tp = self._rng.choice(behind)
        if self._refused(tp):
            self._life.membership.log_lost_its_end(tp)
            return
        most = self._rng.randint(1, 4) if self._cluster.plan.has("truncated_batches") else MOST_RECORDS
        start = self.positions[tp]
        end, records = self._cluster.log.partitions[tp].read(start, most)
        self.positions[tp] = end
        self.ends[tp] = max(end, self.ends[tp])
        if self._cluster.happens("skipped_batch", self._rng, 0.05):
            self.skipped = True
            return
        self._flying += 1
        batch = Batch(tp, start, end, records, self.generation)
        network.hear("batches", f"a batch of {tp} {start} to {end}", self._delivered, batch)

    def _delivered(self, batch: Batch) -> None:
        if batch.generation == self.generation and batch.tp in self.positions:
            self._flying -= 1
            self._life.on_batch(batch)
