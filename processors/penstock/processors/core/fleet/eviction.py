"""Which replicas may be given up for a model that wants their room, and which of them cost least.

They go by cost: what it takes to load them again, times the chance that somebody asks soon, times their priority, times
those it holds up, over the bytes that come back. *Busy* ones go only for more urgent work, or when their turn is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from penstock.processors.core.fleet.views import NEVER, NO_DEMAND, ModelView, PlacementSettings, ReplicaView, Want

SURPLUS, IDLE, BUSY = 0, 1, 2
LEAST_CHANCE = 1e-3
"""Of use soon: among models that nobody uses the load time still counts."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A replica that may be given up. `if_before`: only for work that arrived before this time."""

    replica: ReplicaView
    tier: int
    cost: float
    reason: str
    if_before: float = NEVER


@dataclass(frozen=True, slots=True)
class Choice:
    """Who is given up, and the cost by which devices are compared: the worst tier first."""

    victims: list[Victim]
    cost: tuple[float, float]


@dataclass(eq=False)
class Evictions:
    """What may be given up now. `_ending`: (model, replica) that are given up already."""

    _now: float
    _models: Mapping[str, ModelView]
    _replicas: Sequence[ReplicaView]
    _of_model: Mapping[str, Sequence[ReplicaView]]
    _settings: PlacementSettings
    _ending: Set[tuple[str, int]]
    _victims: dict[tuple[int, bool], list[Victim]] = field(
        init=False, default_factory=dict[tuple[int, bool], list[Victim]]
    )
    waiting_at: set[tuple[str, int]] = field(init=False, default_factory=set[tuple[str, int]])
    """Replicas on which runs wait for memory: of their models' replicas they are those that stay."""
    kept: set[tuple[str, int]] = field(init=False, default_factory=set[tuple[str, int]])
    """Of those, the replicas of runs that come before the one that is served now: they are not given up for it."""

    # -- choosing

    def choose(self, want: Want, shortages: Mapping[str, int]) -> Choice | None:
        """The cheapest that make up for all shortages; None when that cannot be now."""
        victims = [
            victim
            for victim in self._for(want)
            if victim.replica.model != want.view.model
            and (victim.replica.model, victim.replica.replica) not in self._ending
            and (victim.replica.model, victim.replica.replica) not in self.kept
            and want.oldest <= victim.if_before
        ]
        missing, chosen = dict(shortages), list[Victim]()
        for device in shortages:
            here = [v for v in victims if v.replica.bytes.get(device, 0) > 0 and v not in chosen]
            for victim in sorted(here, key=lambda v: (v.tier, v.cost / v.replica.bytes[device])):
                if missing[device] <= 0:
                    break
                chosen.append(victim)
                _add(missing, victim, -1)
        if any(short > 0 for short in missing.values()):
            return None
        for victim in sorted(chosen, key=lambda v: (-v.tier, -v.cost)):  # whom it did not need after all
            if all(missing[device] + held <= 0 for device, held in _held(victim, missing)):
                chosen.remove(victim)
                _add(missing, victim, 1)
        return Choice(chosen, (max(v.tier for v in chosen), sum(v.cost for v in chosen)))

    def idle(self, device: str) -> list[Victim]:
        """Those on a device that nobody uses and nobody waits for, the cheapest first."""
        found = [
            victim
            for victim in self._candidates(NO_DEMAND, aged=False, held=False)
            if not victim.replica.busy and victim.replica.bytes.get(device, 0) > 0
        ]
        return sorted(found, key=lambda v: (v.tier, v.cost / v.replica.bytes[device]))

    def _for(self, want: Want) -> list[Victim]:
        key = (want.rank, want.aged)
        if key not in self._victims:
            self._victims[key] = list(self._candidates(want.rank, aged=want.aged))
        victims = self._victims[key]
        if want.reason == "desired":  # it and another that is kept by order would take turns
            return [one for one in victims if self._models[one.replica.model].desired_loaded is None]
        if want.reason == "saturated":  # two saturated models would take each other's second replica
            return [one for one in victims if not one.replica.busy and not self._is_due(one.replica)]
        return victims

    def _is_due(self, replica: ReplicaView) -> bool:
        """Whether its model should have no fewer replicas: it would be loaded again into the memory that it gave."""
        up = sum(one.state in ("loading", "ready") for one in self._of_model[replica.model])
        return up <= self._models[replica.model].min_replicas

    # -- who may go

    def _candidates(self, rank: int, *, aged: bool, held: bool = True) -> Iterator[Victim]:
        """Who may go for work of this rank; with `held` False even those that are kept idle for a while."""
        for replica in self._replicas:
            view = self._models.get(replica.model)
            if replica.state != "ready" or view is None or (replica.model, replica.replica) in self._ending:
                continue
            surplus = self._is_surplus(view, replica)
            if view.pinned and not surplus:
                continue
            waiting, oldest = view.most_urgent()
            if surplus and (not replica.busy or self._resided(view, replica)):
                yield self._victim(view, replica, SURPLUS, "surplus" if replica.busy else "idle")
            elif not replica.busy and waiting == NO_DEMAND:
                if not held or self._idle_enough(view, replica, rank, aged=aged):
                    yield self._victim(view, replica, IDLE, "idle")
            elif rank < NO_DEMAND:
                own = min(waiting, replica.rank if replica.busy else NO_DEMAND)
                yield from self._busy(view, replica, rank, own, oldest, aged=aged)

    def _busy(
        self, view: ModelView, replica: ReplicaView, rank: int, own: int, oldest: float, *, aged: bool
    ) -> Iterator[Victim]:
        """One that works or is waited for, in class `own`, wanted by work of class `rank`."""
        if rank < own:
            if self._resided(view, replica):
                yield self._victim(view, replica, BUSY, "class")
            return
        if rank > own and not aged:
            return
        if replica.stands and self._resided(view, replica):
            yield self._victim(view, replica, BUSY, "stands")  # a turn in which nothing runs is of use to nobody
            return
        settings = self._settings
        turn_s = settings.turn_s(view) * (settings.aged_share if rank > own else 1)
        since = self._now - (self._now if replica.ready_at is None else replica.ready_at)
        if since >= turn_s:
            patient = since < turn_s * settings.turn_patience and rank == own
            if_before = oldest - settings.lookahead_s if patient else NEVER
            yield self._victim(view, replica, BUSY, "turn", if_before)

    def _is_surplus(self, view: ModelView, replica: ReplicaView) -> bool:
        """Whether enough others of the model stay; those that work stay, and the first ones."""
        up = self._of_model[view.model]
        if len(up) == 1:
            return False
        ready = [one for one in up if one.state == "ready" and (one.model, one.replica) not in self._ending]
        ready.sort(key=lambda one: ((one.model, one.replica) not in self.waiting_at, not one.busy, one.replica))
        return replica in ready[max(1, view.min_replicas) :]

    def _resided(self, view: ModelView, replica: ReplicaView) -> bool:
        """It has been ready for as long as its load took: no class is so urgent that loads take more than half."""
        return replica.ready_at is not None and self._now - replica.ready_at >= view.load_seconds

    def _idle_enough(self, view: ModelView, replica: ReplicaView, rank: int, *, aged: bool) -> bool:
        """Whether it goes at once, or has been idle for as long as it was worth waiting for its next use.

        It is waited for if its next use is expected before it could be gone and back, and for one load's time at most:
        that is at most twice as bad as knowing the future (ski rental). More urgent work does not wait for it; less
        urgent work waits longer, by `class_patience` for each class.
        """
        if replica.last_used_at is None or replica.klass is None or rank < replica.rank:
            return True
        hold_s = view.load_seconds
        share_s = self._settings.turn_s(view) * self._settings.aged_share
        if not (aged and replica.ready_at is not None and self._now - replica.ready_at >= share_s):
            hold_s *= self._settings.class_patience ** (rank - replica.rank)
        return view.use_rate * 2 * hold_s < 1 or self._now - replica.last_used_at >= hold_s

    def _victim(
        self, view: ModelView, replica: ReplicaView, tier: int, reason: str, if_before: float = NEVER
    ) -> Victim:
        chance = max(LEAST_CHANCE, view.chance_of_use(self._settings.soon_s))
        held_up = 1 + replica.running + sum(view.demand.counts.values())
        cost = view.load_seconds * chance * view.priority * held_up
        return Victim(replica, tier, cost, reason, if_before)


def _held(victim: Victim, devices: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(device, held) for device, held in victim.replica.bytes.items() if device in devices]


def _add(missing: dict[str, int], victim: Victim, sign: int) -> None:
    for device, held in _held(victim, missing):
        missing[device] += sign * held
