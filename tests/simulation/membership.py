"""One worker's membership of the group, as `kafka/membership.py` keeps it: joins, learns its offsets, commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.processors.core.commit import donemap
from penstock.processors.core.commit.gate import CommitGate
from simulation.log import TP, IllegalGeneration, UnknownMember

if TYPE_CHECKING:
    from simulation.workers import Life

RETRY_S = 0.2
Offsets = dict[TP, tuple[int, str]]


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
        self._joining = False
        self._committing = False

    def join(self) -> None:
        """Join the group, or join again in a rebalance."""
        if self._life.stopping or self._joining:
            return
        self._joining = True
        self._life.consumer.revoked()
        self._life.network.ask(
            "group", "joins", self._cluster.coordinator.joins(self._life, self.member_id), self._joined
        )

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
        def look() -> Offsets | None:
            if self._cluster.happens("unknown_offsets", self._rng, 0.5):
                return None
            if generation == self._group.generation:  # else the members have begun, and no tool may commit for them
                self._disturb(assigned)
            return self._group.committed(assigned)

        self._life.network.ask(
            "group", "asks for offsets", look, lambda offsets: self._offsets_told(generation, assigned, offsets)
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
            self._group.offsets[tp] = offset, donemap.encode(elsewhere, [(elsewhere + 1, elsewhere + 4)])

    def _offsets_told(self, generation: int, assigned: tuple[TP, ...], offsets: Offsets | None) -> None:
        if offsets is None:
            if generation == self._group.generation:
                life, world = self._life, self._life.world
                world.at(RETRY_S, life, f"{life.name} will ask again", self._ask_offsets, generation, assigned)
            return
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
        self.generation = generation
        fenced, self._fenced = self._fenced, False
        self._life.on_assigned({tp: offsets[tp] for tp in assigned}, generation, fenced)

    def _store(self, generation: int, offsets: Offsets) -> Callable[[], str]:
        def store() -> str:
            try:
                self._group.commit(self.member_id or "", generation, offsets)
            except (UnknownMember, IllegalGeneration) as error:
                return type(error).__name__
            return "taken"

        return store

    def commit(self, gate: CommitGate, then: Callable[[bool], None]) -> None:
        """Commit what the gate names, one commit at a time. `then` is told whether another one may be due."""
        if self._committing or self.generation < 0:
            then(self._committing)
            return
        offsets = dict(sorted(gate.commits().items()))
        if not offsets:
            then(False)
            return
        self._committing = True
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
            then(True)

        self._life.network.ask("group", "commits", send, told)

    def leave(self, gate: CommitGate, left: Callable[[], None]) -> None:
        """Commit, then leave."""

        def go(_: bool) -> None:
            self._life.network.ask("group", "leaves", self._cluster.coordinator.leaves(self._life), lambda _: left())

        self.commit(gate, go)
