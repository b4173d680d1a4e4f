"""One worker's membership of the group, as `kafka/membership.py` keeps it: joins, learns its offsets, commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from penstock.processors.core.commit import donemap
from penstock.processors.core.commit.commit import Commit
from penstock.processors.kafka.lost_logs import Extent, LostLogs
from simulation.log import TP, IllegalGeneration, Log, UnknownMember

if TYPE_CHECKING:
    from simulation.workers import Life

RETRY_S = 0.2
FENCED = {UnknownMember: KafkaError.UNKNOWN_MEMBER_ID, IllegalGeneration: KafkaError.ILLEGAL_GENERATION}
Offsets = dict[TP, tuple[int, str]]


def _give_up(seconds: float, reason: str) -> bool:
    """Nothing is waited for where the log is."""
    return True


class Broker:
    """What `LostLogs` asks of a consumer, answered where the log is."""

    def __init__(self, log: Log, member_id: str | None, generation: int) -> None:
        self._log = log
        self._member_id = member_id or ""
        self._generation = generation

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        ends = {(p.topic, p.partition): self._log.partitions[(p.topic, p.partition)].end for p in partitions}
        return [
            TopicPartition(*tp, end if p.offset == OFFSET_END else 0)
            for p, (tp, end) in zip(partitions, ends.items(), strict=True)
        ]

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> Sequence[TopicPartition]:
        stored = {(p.topic, p.partition): (p.offset, p.metadata or "") for p in offsets}
        try:
            self._log.group.commit(self._member_id, self._generation, stored)
        except (UnknownMember, IllegalGeneration) as error:
            raise KafkaException(KafkaError(FENCED[type(error)])) from error
        return offsets


class Membership:
    """Unknown is never none: an assignment is told when the committed offset of each partition is known."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._cluster = life.cluster
        self._group = life.cluster.log.group
        self._rng = life.world.stream(f"membership/{life.name}")
        self.member_id: str | None = None
        self.generation = -1
        self._fenced = False
        self._lost_logs = LostLogs(life.cluster.plan.on_lost_log)
        self._mending = False
        """A position was refused: until the next assignment."""
        self._known: Offsets = {}
        """What is committed of its partitions, as far as it knows."""
        self._sent: Offsets = {}
        """What it has sent last in this assignment, whatever the answer was."""
        self.about_to_read: frozenset[TP] = frozenset()
        """Of an assignment whose logs were looked at, and whose offsets are not told yet: nothing is read."""
        self._joining = False
        self._committing = False

    def join(self) -> None:
        """Join the group, or join again in a rebalance."""
        if self._life.stopping or self._joining:
            return
        self._joining = True
        self.about_to_read = frozenset()
        self._remember_what_was_read()
        self._life.consumer.revoked()
        self._life.network.ask(
            "group", "joins", self._cluster.coordinator.joins(self._life, self.member_id), self._joined
        )

    def _remember_what_was_read(self) -> None:
        """As the product's consumer does when its partitions are taken from it."""
        for tp, end in self._life.consumer.ends.items():
            possible = [one[tp] for one in (self._known, self._sent) if tp in one]
            self._lost_logs.has_read(tp, end, possible)

    def _joined(self, member_id: str | None) -> None:
        self._joining = False
        if member_id is None:
            self.thrown_out()
        else:
            self.member_id = member_id

    def thrown_out(self) -> None:
        """The coordinator does not know this member any more: others may have taken its partitions."""
        self._fenced = True
        if not self._joining:
            self.member_id = None
            self.join()

    def synced(self, generation: int, assigned: tuple[TP, ...]) -> None:
        """The rebalance is over."""
        if generation == self._group.generation and not self._life.stopping:
            self._ask_offsets(generation, assigned)

    def _ask_offsets(self, generation: int, assigned: tuple[TP, ...]) -> None:
        def look() -> tuple[Offsets, bool] | None:
            if self._cluster.happens("unknown_offsets", self._rng, 0.5):
                return None
            if generation == self._group.generation:  # else the members have begun, and no tool may commit for them
                self._disturb(assigned)
            committed = self._group.committed(assigned)
            begun = self._lost_logs.at_assignment(self._broker(generation), committed, _give_up)
            if begun is None:
                return None
            self.about_to_read = frozenset(assigned)
            return dict(begun), begun is not committed

        self._life.network.ask(
            "group", "asks for offsets", look, lambda offsets: self._offsets_told(generation, assigned, offsets)
        )

    def log_lost_its_end(self, tp: TP) -> None:
        """The broker refuses a position: the lower offset is committed, and the worker joins anew."""
        if self._mending:
            return
        self._mending, known = True, self._known[tp]
        self._lost_logs.position_refused(tp, known)
        broker, end = self._broker(self.generation), self._cluster.log.partitions[tp].end

        def begin_again() -> None:
            self._lost_logs.begin_again(broker, {tp: known}, {tp: Extent(0, end)}, _give_up)

        self._life.network.ask("group", "commits a lower offset", begin_again, lambda _: None)
        self._life.network.ask(
            "group", "leaves", self._cluster.coordinator.leaves(self._life), lambda _: self.thrown_out()
        )

    def _disturb(self, assigned: tuple[TP, ...]) -> None:
        """What tools do to the offsets of a group: they move some on, or store metadata that is no map of theirs."""
        cluster = self._cluster
        known = sorted(tp for tp in assigned if tp in self._group.offsets)
        if known and cluster.plan.has("moved_offsets") and cluster.happens("moved_offsets", self._rng, 0.2):
            tp = self._rng.choice(known)
            cluster.truth.skip(tp, self._group.offsets[tp][0], self._rng.randint(1, 4))
        if known and cluster.plan.has("foreign_metadata") and cluster.happens("foreign_metadata", self._rng, 0.4):
            tp = self._rng.choice(known)
            offset = self._group.offsets[tp][0]
            elsewhere = offset + self._rng.randint(1, 3)
            if not cluster.log.partitions[tp].cuts:  # else its owner takes the tool for a member that has begun again
                self._group.offsets[tp] = offset, donemap.encode(elsewhere, [(elsewhere + 1, elsewhere + 4)])

    def _offsets_told(self, generation: int, assigned: tuple[TP, ...], found: tuple[Offsets, bool] | None) -> None:
        if found is None:
            if generation == self._group.generation:
                life, world = self._life, self._life.world
                world.at(RETRY_S, life, f"{life.name} will ask again", self._ask_offsets, generation, assigned)
            return
        offsets, begins_again = found
        self._fenced = self._fenced or begins_again  # offsets mean other records than what was worked on
        missing: Offsets = {tp: (0, "") for tp in assigned if tp not in offsets}
        if not missing:
            self._assigned(generation, assigned, offsets)
            return

        def told(taken: str) -> None:
            if taken == "taken":
                self._assigned(generation, assigned, {**offsets, **missing})

        self._life.network.ask("group", "commits start offsets", self._store(generation, missing), told)

    def _assigned(self, generation: int, assigned: tuple[TP, ...], offsets: Offsets) -> None:
        if generation != self._group.generation:
            return  # over already: the next one is on its way
        self.generation, self.about_to_read = generation, frozenset()
        fenced, self._fenced = self._fenced, False
        self._known, self._sent = {tp: offsets[tp] for tp in assigned}, {}
        self._mending = False
        self._life.on_assigned({tp: offsets[tp] for tp in assigned}, generation, fenced)

    def _broker(self, generation: int) -> Broker:
        return Broker(self._cluster.log, self.member_id, generation)

    def _store(self, generation: int, offsets: Offsets) -> Callable[[], str]:
        def store() -> str:
            try:
                self._group.commit(self.member_id or "", generation, offsets)
            except (UnknownMember, IllegalGeneration) as error:
                return type(error).__name__
            return "taken"

        return store

    def commit(self, gate: Commit, then: Callable[[bool], None]) -> None:
        """Commit what the gate names, one commit at a time. `then` is told whether another one may be due."""
        if self._committing or self.generation < 0:
            then(self._committing)
            return
        offsets = dict(sorted(gate.commits().items()))
        if not offsets:
            then(False)
            return
        self._committing = True
        self._sent.update(offsets)
        generation = self.generation
        if self._cluster.happens("refused_commit", self._rng, 0.2):
            send: Callable[[], Any] = lambda: "CoordinatorLoadInProgress"  # noqa: E731
        else:
            send = self._store(generation, offsets)

        def told(answer: str) -> None:
            self._committing = False
            if self._cluster.happens("lost_commit_ack", self._rng, 0.2):
                answer = "timed out"
            if answer == "taken" and gate.generation == generation:
                for tp, (offset, metadata) in offsets.items():
                    gate.committed(tp, offset, metadata)
                    self._known[tp] = offset, metadata
            then(True)

        self._life.network.ask("group", "commits", send, told)

    def leave(self, gate: Commit, left: Callable[[], None]) -> None:
        """Commit, then leave."""

        def go(_: bool) -> None:
            self._life.network.ask("group", "leaves", self._cluster.coordinator.leaves(self._life), lambda _: left())

        self.commit(gate, go)
