"""Placement: which model is loaded where, and which is given up for it. Pure: views in, decisions out.

Called again after each change and now and then; it remembers nothing. What it decided before it sees in the states of
the replicas. The rules, and why they never livelock, stand in `docs/decisions/0022`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from penstock.processors.core.fleet.eviction import Evictions
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.views import (
    HOST,
    NEVER,
    NO_DEMAND,
    Decision,
    Drain,
    Load,
    ModelView,
    Need,
    PlacementSettings,
    ReplicaView,
    Reserve,
    Unload,
    Want,
)

DEFAULTS = PlacementSettings()


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to place a replica: its devices, and the bytes that it takes of each, host memory included."""

    devices: tuple[str, ...]
    needs: Mapping[str, int]


def decide(
    now: float,
    models: Sequence[ModelView],
    replicas: Sequence[ReplicaView],
    ledger: Ledger,
    settings: PlacementSettings = DEFAULTS,
) -> list[Decision]:
    """What to load, drain and unload now, in the order of carrying it out."""
    return _Round(now, models, replicas, ledger, settings).decide()


PLANS: WeakKeyDictionary[Ledger, dict[tuple[str, Need], list[Plan]]] = WeakKeyDictionary()
"""Made once for each ledger and need: they depend on its devices alone, which never change."""
PLANS_KEPT = 1024
"""Needs that are learned, and those of runs, are always new ones."""


def _plans_of_one(ledger: Ledger, name: str, need: Need) -> list[Plan]:
    """A plan for each single device of this name or kind that could ever hold it."""
    known = PLANS.setdefault(ledger, {})
    plans = known.get((name, need))
    if plans is None:
        devices = [one.device for one in ledger.devices() if name in (one.device, one.kind)]
        plans = [Plan((device,), _needs(ledger, (device,), need)) for device in devices]
        if len(known) >= PLANS_KEPT:
            known.clear()
        plans = known[name, need] = [plan for plan in plans if ledger.fits_ever(plan.needs)]
    return plans


def _needs(ledger: Ledger, devices: Sequence[str], need: Need) -> dict[str, int]:
    needs = dict.fromkeys(devices, need.bytes)
    if need.host_bytes and HOST not in needs and any(one.device == HOST for one in ledger.devices()):
        needs[HOST] = need.host_bytes
    return needs


class _Round:
    """One call of `decide`. `room`: what is free by device, less what this round has given to somebody.

    Below zero where more is taken than the limit allows: so much must come back first.
    """

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
        self._ledger = ledger
        self._models = {view.model: view for view in models}
        self._replicas = replicas
        self._of_model: dict[str, list[ReplicaView]] = {view.model: [] for view in models}
        self._capacities = ledger.devices()
        self._unknown = {one.device for one in self._capacities if not ledger.observed(one.device)}
        self._room = {
            one.device: -1
            if one.device in self._unknown
            else ledger.free_bytes(one.device) - ledger.over_bytes(one.device)
            for one in self._capacities
        }
        self._kept = {one.device: ledger.reservation(one.device, now) for one in self._capacities}
        self._coming = dict.fromkeys(self._room, 0)
        self._runs = dict.fromkeys(self._room, 0)
        self._run_bytes = dict.fromkeys(self._room, 0)
        """By device, what runs hold of it that end by themselves, on replicas that stay."""
        self._contested: set[str] = set()
        self._decisions: list[Decision] = []
        self._ending: set[tuple[str, int]] = set()
        self._evictions = Evictions(now, self._models, replicas, self._of_model, settings, self._ending)
        for replica in replicas:
            self._of_model.setdefault(replica.model, []).append(replica)
            for device in self._runs.keys() & replica.devices:
                self._runs[device] += replica.running
                self._run_bytes[device] += replica.run_bytes
            if replica.state in ("draining", "unloading"):
                self._count_coming(replica)

    def decide(self) -> list[Decision]:
        for replica in self._replicas:
            self._end_unwanted(replica)
        self._relieve()
        wants = self._wants()
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
            self._scale_out()
        return self._decisions

    def _count_coming(self, replica: ReplicaView) -> None:
        for device, held in replica.bytes.items():
            if device in self._coming:
                self._coming[device] += held
        for device in self._coming.keys() & replica.devices:
            self._coming[device] += replica.run_bytes
            self._run_bytes[device] -= replica.run_bytes

    # -- ending without being asked by others

    def _end_unwanted(self, replica: ReplicaView) -> None:
        view = self._models.get(replica.model)
        if replica.state == "draining":
            if not replica.busy:
                self._decisions.append(
                    Unload(model=replica.model, replica=replica.replica, reason="drained", for_model=replica.for_model)
                )
        elif replica.state == "ready":
            if replica.end_reason is not None:
                self._end(replica, replica.end_reason, None)
            elif view is not None and not replica.busy and self._outlived(view, replica):
                self._end(replica, "keep_alive", None)

    def _outlived(self, view: ModelView, replica: ReplicaView) -> bool:
        if view.keep_alive_s is None or view.pinned or view.preload or view.desired_loaded:
            return False
        if view.most_urgent()[0] < NO_DEMAND or len(self._of_model[view.model]) <= view.min_replicas:
            return False
        times = [at for at in (replica.last_used_at, replica.ready_at) if at is not None]
        return bool(times) and self._now - max(times) >= view.keep_alive_s

    def _end(self, replica: ReplicaView, reason: str, for_model: str | None) -> None:
        self._ending.add((replica.model, replica.replica))
        self._count_coming(replica)
        decision = Drain if replica.busy else Unload
        self._decisions.append(
            decision(model=replica.model, replica=replica.replica, for_model=for_model, reason=reason)
        )

    def _relieve(self) -> None:
        """Foreign use has grown past what was granted: what lies idle gives its room back."""
        for capacity in self._capacities:
            over = self._ledger.over_bytes(capacity.device) - self._coming[capacity.device]
            if over <= 0:
                continue
            for victim in self._evictions.idle(capacity.device):
                if over <= 0:
                    break
                self._end(victim.replica, "over_limit", None)
                over -= victim.replica.bytes[capacity.device]

    def _drop_reservations(self, wanting: Set[str]) -> None:
        """What was to be loaded is not wanted any more: no room is kept for it."""
        for device, kept in self._kept.items():
            if kept is not None and kept[0] in self._models and kept[0] not in wanting:
                self._kept[device] = None
                self._decisions.append(Reserve(model=kept[0], device=device, bytes=0, until=self._now))

    # -- who wants a replica

    def _wants(self) -> list[Want]:
        """All of them, in the order of serving."""
        wants = [want for view in self._models.values() if (want := self._want(view)) is not None]
        if not wants:
            return []
        promised = self._promised()
        orders = {want.view.model: min(want.order, promised.get(want.view.model, NEVER)) for want in wants}
        first: dict[float, float] = {}
        for want in wants:
            order = orders[want.view.model]
            first[order] = min(first.get(order, NEVER), want.oldest)

        def by_lookahead(want: Want) -> tuple[float, ...]:
            view, order = want.view, orders[want.view.model]
            near = (
                0.0 if want.oldest == NEVER else (want.oldest - first[order]) // max(self._settings.lookahead_s, 1e-9)
            )
            weight = view.demand.weight or float(sum(view.demand.counts.values()))
            # Of those that are near: Smith's rule, weight over time. It makes the weighted sum of waiting least on one
            # machine (W. E. Smith, "Various optimizers for single-stage production", 1956).
            # Before them come runs of loaded models: were another model loaded in place of theirs, its runs would wait
            # as theirs do now, and none would ever end.
            rate = weight / max(view.load_seconds, 1e-3)
            return (order, view.model not in promised, near, view.at is None, -rate, want.oldest)

        return sorted(wants, key=by_lookahead)

    def _promised(self) -> dict[str, float]:
        """For whom others are being given up, and the rank of the most urgent of those.

        The room that comes is theirs: who gave it up does not take it back, or the two would take turns for ever.
        """
        promised: dict[str, float] = {}
        for replica in self._replicas:
            if replica.for_model is not None and replica.state in ("draining", "unloading"):
                victim = self._models.get(replica.model)
                rank = NEVER if victim is None else victim.most_urgent()[0]
                promised[replica.for_model] = min(promised.get(replica.for_model, NEVER), rank)
        return promised

    def _want(self, view: ModelView) -> Want | None:
        if view.desired_loaded is False or self._now < view.broken_until:
            return None
        up = sum(replica.state in ("loading", "ready") for replica in self._of_model[view.model])
        rank, oldest = view.most_urgent()
        if up == 0 and rank < NO_DEMAND:
            waited = self._now - min(view.demand.oldest[klass] for klass, count in view.demand.counts.items() if count)
            aged = rank > 0 and waited > self._settings.aging_s
            starved = rank > 0 and waited > self._settings.aging_s * self._settings.aged_share
            return Want(view, "demand", rank, oldest, 0.0 if starved else float(rank), aged)
        standing = (
            (view.pinned and up == 0, "pinned"),
            (view.desired_loaded is True and up == 0, "desired"),
            (view.preload and up == 0, "preload"),
            (up < min(view.min_replicas, view.max_replicas), "replicas"),
        )
        for place, (holds, reason) in enumerate(standing):
            if holds:
                return Want(view, reason, NO_DEMAND, NEVER, float(NO_DEMAND + place))
        return None

    # -- into free memory

    def _place(self, want: Want) -> bool:
        """Load it where it fits now; whether it did."""
        for plans in self._plans(want.view):
            fitting = [plan for plan in plans if self._fits(plan, want.view.model)]
            if fitting:
                best = max(fitting, key=lambda plan: (self._room[plan.devices[0]], -self._runs[plan.devices[0]]))
                self._load(want.view, best, want.reason)
                return True
        return False

    def _free(self, device: str, model: str) -> int:
        """What this round may still give of a device; less what is reserved for another."""
        kept = self._kept[device]
        return self._room[device] - (0 if kept is None or kept[0] == model else kept[1])

    def _fits(self, plan: Plan, model: str) -> bool:
        for device, need in plan.needs.items():
            if need > self._room[device] or need > self._free(device, model):
                return False
        return True

    def _load(self, view: ModelView, plan: Plan, reason: str) -> None:
        taken = {replica.replica for replica in self._of_model[view.model]}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        self._claim(plan, view.model)
        self._decisions.append(
            Load(
                model=view.model,
                replica=number,
                device=plan.devices[0],
                devices=plan.devices,
                needs=plan.needs,
                reason=reason,
            )
        )

    def _claim(self, plan: Plan, model: str) -> None:
        for device, need in plan.needs.items():
            self._room[device] -= need
            kept = self._kept[device]
            if kept is not None and kept[0] == model:
                self._kept[device] = None

    def _plans(self, view: ModelView) -> Iterator[list[Plan]]:
        """The ways to place a model that could ever fit, by its needs in their order."""
        for name, need in view.needs.items():
            plans = _plans_of_one(self._ledger, name, need)
            if need.devices > 1:
                devices = sorted(
                    (plan.devices[0] for plan in plans),
                    key=lambda device: -(self._free(device, view.model) + self._coming[device]),
                )[: need.devices]
                plan = Plan(tuple(devices), _needs(self._ledger, devices, need))
                plans = [plan] if len(devices) == need.devices else []
            yield plans

    # -- by giving others up

    def _make_room(self, want: Want) -> None:
        """It does not fit now: wait for what is ending, give others up for it, or keep what room there is."""
        if want.reason in ("preload", "replicas"):
            return
        plans = self._open_plans(want)
        if plans and not self._wait_for_room(want, plans) and not self._evict(want, plans):
            self._keep_room(want, plans)

    def _open_plans(self, want: Want) -> list[Plan]:
        """Its plans, by its first kind of device that could hold it, on devices that nobody before it waits for."""
        plans = next((plans for plans in self._plans(want.view) if plans), [])
        if self._contested:
            plans = [plan for plan in plans if self._contested.isdisjoint(plan.devices)]
        if self._unknown:
            plans = [plan for plan in plans if self._unknown.isdisjoint(plan.needs)]
        return plans

    def _shortages(self, plan: Plan, want: Want, *, runs_end: bool) -> dict[str, int]:
        """Bytes that are missing by device, once all that is ending has ended; with `runs_end` the runs of others too.

        Those end by themselves, but others follow them: unless room is kept.
        """
        model, runs = want.view.model, self._run_bytes
        missing = {
            device: need - self._free(device, model) - self._coming[device] - (runs[device] if runs_end else 0)
            for device, need in plan.needs.items()
        }
        return {device: short for device, short in missing.items() if short > 0}

    def _keeps_room(self, want: Want) -> bool:
        since = want.oldest if want.view.waits_since is None else want.view.waits_since
        return self._settings.keeps_room(self._now - since)

    def _wait_for_room(self, want: Want, plans: Sequence[Plan]) -> bool:
        """Whether what is ending already makes room for it: then that room is its own."""
        keeps = self._keeps_room(want)
        waiting = [plan for plan in plans if not self._shortages(plan, want, runs_end=keeps)]
        if not waiting:
            return False
        own = {
            replica.device
            for replica in self._replicas
            if replica.for_model == want.view.model and replica.state in ("draining", "unloading")
        }
        plan = max(waiting, key=lambda plan: (plan.devices[0] in own, self._room[plan.devices[0]]))
        self._contest(plan, want)
        return True

    def _contest(self, plan: Plan, want: Want) -> None:
        """Room is being made here for it: it is its own, also when those who held it are gone and no view tells why."""
        self._claim(plan, want.view.model)
        self._contested.update(plan.devices)
        self._decisions.extend(
            Reserve(model=want.view.model, device=device, bytes=need, until=NEVER)
            for device, need in plan.needs.items()
        )

    def _evict(self, want: Want, plans: Sequence[Plan]) -> bool:
        """Give up the cheapest that makes room for it, if those who hold the room may be given up now."""
        missing = [(self._shortages(plan, want, runs_end=True), plan) for plan in plans]
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

    def _keep_room(self, want: Want, plans: Sequence[Plan]) -> None:
        """Nobody may be given up for it yet. If it has waited long, those behind it leave it the room there is.

        What came before more urgent work only by its age does not hold that up.
        """
        if want.order >= want.rank and self._keeps_room(want):
            plan = min(plans, key=lambda plan: sum(self._shortages(plan, want, runs_end=True).values()))
            self._claim(plan, want.view.model)
            self._contested.update(plan.devices)

    # -- more of what is saturated

    def _scale_out(self) -> None:
        """All that is asked for is loaded: a saturated model gets one replica more, into memory that nobody uses."""
        for view in self._models.values():
            since = view.saturated_since
            if since is None or view.paused or view.desired_loaded is False or self._now < view.broken_until:
                continue
            replicas = [one for one in self._of_model[view.model] if one.state in ("loading", "ready")]
            if not 0 < len(replicas) < view.max_replicas or any(one.state == "loading" for one in replicas):
                continue
            if self._now - since >= max(self._settings.scale_after_s, view.load_seconds):
                want = Want(view, "saturated", NO_DEMAND, NEVER, NEVER)
                if not self._place(want):
                    self._make_room(want)
