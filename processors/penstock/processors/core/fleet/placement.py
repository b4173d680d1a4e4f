"""Placement: which model is loaded where, and which is given up for it. Pure: views in, decisions out.

Called again after each change and now and then; it remembers nothing. What it decided before it sees in the states of
the replicas. The rules, and why they never livelock, are in `docs/decisions/0022`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from penstock.processors.core.fleet.eviction import Evictions
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.space import PlacementPlan, Space
from penstock.processors.core.fleet.views import (
    NEVER,
    Decision,
    Drain,
    ModelView,
    PlacementSettings,
    PlannedLoad,
    PlannedUnload,
    ReplicaView,
    Reserve,
    Want,
)
from penstock.processors.core.fleet.wants import Wants

DEFAULTS = PlacementSettings()


def decide(
    now: float,
    models: Sequence[ModelView],
    replicas: Sequence[ReplicaView],
    ledger: Ledger,
    settings: PlacementSettings = DEFAULTS,
) -> list[Decision]:
    """What to load, drain and unload now, in the order of carrying it out."""
    return _Round(now, models, replicas, ledger, settings).decide()


class _Round:
    """One call of `decide`."""

    def __init__(
        self,
        now: float,
        models: Sequence[ModelView],
        replicas: Sequence[ReplicaView],
        ledger: Ledger,
        settings: PlacementSettings,
    ) -> None:
        self._now = now
        self._settings = settings
        self._models = {view.model: view for view in models}
        self._replicas = replicas
        self._of_model: dict[str, list[ReplicaView]] = {view.model: [] for view in models}
        self._space = Space(ledger, replicas, now)
        self._decisions: list[Decision] = []
        self._ending: set[tuple[str, int]] = set()
        self._evictions = Evictions(now, self._models, replicas, self._of_model, settings, self._ending)
        self._wants = Wants(now, self._models, replicas, self._of_model, settings)
        for replica in replicas:
            self._of_model.setdefault(replica.model, []).append(replica)

    def decide(self) -> list[Decision]:
        for replica in self._replicas:
            self._end_unwanted(replica)
        self._relieve()
        wants = self._wants.in_order()
        self._drop_reservations({want.view.model for want in wants})
        blocked = False
        self._evictions.waiting_at = {view.at for view in self._models.values() if view.at is not None}
        for want in wants:
            at = want.view.at
            if at is not None:
                if at in self._ending:
                    continue  # where it would run is given up for one before it
                self._evictions.kept.add(at)
            if not self._place(want):
                blocked = True
                self._make_room(want)
        if not blocked:
            for want in self._wants.to_scale_out():
                if not self._place(want):
                    self._make_room(want)
        return self._decisions

    # -- ending without being asked by others

    def _end_unwanted(self, replica: ReplicaView) -> None:
        view = self._models.get(replica.model)
        if replica.state == "draining":
            if not replica.busy:
                self._decisions.append(
                    PlannedUnload(
                        model=replica.model, replica=replica.replica, reason="drained", for_model=replica.for_model
                    )
                )
        elif replica.state == "loading" and replica.end_reason is not None:
            self._ending.add((replica.model, replica.replica))
            self._space.count_coming(replica)
            self._decisions.append(
                PlannedUnload(model=replica.model, replica=replica.replica, reason=replica.end_reason, for_model=None)
            )
        elif replica.state == "ready":
            if replica.end_reason is not None:
                self._end(replica, replica.end_reason, None)
            elif view is not None and not replica.busy and self._wants.outlived(view, replica):
                self._end(replica, "keep_alive", None)

    def _end(self, replica: ReplicaView, reason: str, for_model: str | None) -> None:
        self._ending.add((replica.model, replica.replica))
        self._space.count_coming(replica)
        decision = Drain if replica.busy else PlannedUnload
        self._decisions.append(
            decision(model=replica.model, replica=replica.replica, for_model=for_model, reason=reason)
        )

    def _relieve(self) -> None:
        """Foreign use has grown past what was granted: what lies idle gives its room back."""
        for device in self._space.devices:
            over = self._space.ledger.over_bytes(device) - self._space.coming[device]
            if over <= 0:
                continue
            for victim in self._evictions.idle(device):
                if over <= 0:
                    break
                self._end(victim.replica, "over_limit", None)
                over -= victim.replica.bytes[device]

    def _drop_reservations(self, wanting: Set[str]) -> None:
        """What was to be loaded is not wanted any more: no room is kept for it."""
        for device, kept in self._space.kept.items():
            if kept is not None and kept[0] in self._models and kept[0] not in wanting:
                self._space.kept[device] = None
                self._decisions.append(Reserve(model=kept[0], device=device, bytes=0, until=self._now))

    # -- into free memory

    def _place(self, want: Want) -> bool:
        """Load it where it fits now; whether it did."""
        space = self._space
        for plans in space.plans(want.view):
            fitting = [plan for plan in plans if self._space.fits(plan, want.view.model)]
            if fitting:
                best = max(
                    fitting, key=lambda plan: (self._space.room[plan.devices[0]], -self._space.runs[plan.devices[0]])
                )
                self._load(want.view, best, want.reason)
                return True
        return False

    def _load(self, view: ModelView, plan: PlacementPlan, reason: str) -> None:
        taken = {replica.replica for replica in self._of_model[view.model]}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        self._space.claim(plan, view.model)
        self._decisions.append(
            PlannedLoad(
                model=view.model,
                replica=number,
                device=plan.devices[0],
                devices=plan.devices,
                needs=plan.needs,
                reason=reason,
            )
        )

    # -- by giving others up

    def _make_room(self, want: Want) -> None:
        """It does not fit now: wait for what is ending, give others up for it, or keep what room there is."""
        if want.reason in ("preload", "replicas"):
            return
        plans = self._space.open_plans(want.view)
        if plans and not self._wait_for_room(want, plans) and not self._evict(want, plans):
            self._keep_room(want, plans)

    def _keeps_room(self, want: Want) -> bool:
        since = want.oldest if want.view.waits_since is None else want.view.waits_since
        return self._settings.keeps_room(self._now - since)

    def _wait_for_room(self, want: Want, plans: Sequence[PlacementPlan]) -> bool:
        """Whether what is ending already makes room for it: then that room is its own."""
        keeps = self._keeps_room(want)
        waiting = [plan for plan in plans if not self._space.shortages(plan, want.view.model, runs_end=keeps)]
        if not waiting:
            return False
        own = {
            replica.device
            for replica in self._replicas
            if replica.for_model == want.view.model and replica.state in ("draining", "unloading")
        }
        plan = max(waiting, key=lambda plan: (plan.devices[0] in own, self._space.room[plan.devices[0]]))
        self._contest(plan, want)
        return True

    def _contest(self, plan: PlacementPlan, want: Want) -> None:
        """Room is being made here for it: it is its own, also when those who held it are gone and no view says why."""
        self._space.claim(plan, want.view.model, contest=True)
        self._decisions.extend(
            Reserve(model=want.view.model, device=device, bytes=need, until=NEVER)
            for device, need in plan.needs.items()
        )

    def _evict(self, want: Want, plans: Sequence[PlacementPlan]) -> bool:
        """Give up the cheapest that makes room for it, if those who hold the room may be given up now."""
        missing = [(self._space.shortages(plan, want.view.model, runs_end=True), plan) for plan in plans]
        if not all(short for short, _ in missing):
            return False  # it fits when those that run have ended: nobody is given up for that
        choices = [(self._evictions.choose(want, short), plan) for short, plan in missing]
        possible = [(choice, plan) for choice, plan in choices if choice is not None]
        if not possible:
            return False
        choice, plan = min(possible, key=lambda one: one[0].cost)
        for victim in choice.victims:
            self._end(victim.replica, victim.reason, want.view.model)
        self._contest(plan, want)
        return True

    def _keep_room(self, want: Want, plans: Sequence[PlacementPlan]) -> None:
        """Nobody may be given up for it yet. If it has waited long, those behind it leave it the room there is.

        What came before more urgent work only by its age does not hold that up.
        """
        if want.order >= want.rank and self._keeps_room(want):
            plan = min(
                plans, key=lambda plan: sum(self._space.shortages(plan, want.view.model, runs_end=True).values())
            )
            self._space.claim(plan, want.view.model, contest=True)
