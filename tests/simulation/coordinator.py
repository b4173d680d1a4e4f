"""When the group's rebalances happen: sessions that run out, members that join again, assignments on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.log import UnknownMember

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.workers import Life

SESSION_S = 1.0


class Coordinator:
    """Gives time to `log.Group`, which knows none."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._group = cluster.log.group
        self._lives: dict[str, Life] = {}
        self._asked: set[str] = set()
        self._thrown_out: list[Life] = []

    def joins(self, life: Life, member_id: str | None) -> Callable[[], str | None]:
        """At the broker: the member joins; None when it is not known any more."""

        def join() -> str | None:
            try:
                joined = self._group.join(self._cluster.topics, member_id, life.host.name)
            except UnknownMember:
                return None
            self._lives[joined] = life
            self._asked.discard(joined)
            self._go_on()
            if not life.network.reachable:
                self.unreachable(life)
            return joined

        return join

    def leaves(self, life: Life) -> Callable[[], None]:
        def leave() -> None:
            for member_id in self._ids(life):
                self._remove(member_id)

        return leave

    def unreachable(self, life: Life) -> None:
        """Heartbeats stop: the session runs out if they do not come again."""
        for member_id in self._ids(life):
            self._world.at(SESSION_S, None, f"the session of {life.name} runs out?", self._expire, member_id, life)

    def _ids(self, life: Life) -> list[str]:
        return [member_id for member_id, whose in self._lives.items() if whose is life]

    def _expire(self, member_id: str, life: Life) -> None:
        if not life.network.reachable and member_id in self._group.members:
            self._world.note(f"the session of {life.name} has run out")
            self._thrown_out.append(life)
            self._remove(member_id)

    def reachable(self, life: Life) -> None:
        """Heartbeats come again, and are answered with what happened meanwhile."""
        if life in self._thrown_out:
            self._thrown_out.remove(life)
            life.network.hear("group", "that it was thrown out", life.membership.thrown_out)

    def partitions_added(self) -> None:
        """Members that see more partitions ask for a rebalance."""
        if self._group.members:
            self._group.prepare()
            self._go_on()

    def _remove(self, member_id: str) -> None:
        self._group.remove(member_id)
        self._lives.pop(member_id, None)
        self._go_on()

    def _go_on(self) -> None:
        """Ask for those that must join again; end the rebalance when all have."""
        if not self._group.rebalancing:
            return
        for member_id in sorted(self._group.rejoining - self._asked):
            life = self._lives.get(member_id)
            if life is not None:
                self._asked.add(member_id)
                life.network.hear("group", "of a rebalance", life.membership.join)
        if self._group.complete():
            self._asked.clear()
            self._world.note(f"generation {self._group.generation}")
            for member_id in sorted(self._group.members):
                member = self._group.members[member_id]
                life = self._lives[member_id]
                life.network.hear("group", "its assignment", life.membership.synced, member.generation, member.assigned)
