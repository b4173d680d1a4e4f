"""A made-up fleet around the real ledger and placement: loads take time and may fail, requests come and go."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.processors.core.fleet.ledger import DeviceCapacity, Ledger, MemoryGrant
from penstock.processors.core.fleet.placement import decide
from penstock.processors.core.fleet.views import (
    RANKS,
    Decision,
    Demand,
    Drain,
    ModelView,
    PlacementSettings,
    PlannedLoad,
    PlannedUnload,
    ReplicaView,
    Reserve,
    UseRate,
)

UNLOAD_S = 0.2


@dataclass(slots=True)
class FakeReplica:
    model: str
    replica: int
    devices: tuple[str, ...]
    grant: MemoryGrant
    until: float
    state: str = "loading"
    ready_at: float | None = None
    last_used_at: float | None = None
    runs: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    klass: str | None = None
    for_model: str | None = None
    fails: bool = False


@dataclass(slots=True)
class Waiting:
    klass: str
    at: float
    run_s: float


class PlacementWorld:
    """Time is the caller's: `add` requests, `go` on. Checks the ledger at each step; counts loads and evictions."""

    def __init__(
        self,
        devices: Sequence[DeviceCapacity],
        models: Sequence[ModelView],
        settings: PlacementSettings | None = None,
        *,
        slots: int = 2,
    ) -> None:
        self.ledger = Ledger(devices)
        self.limits = {one.device: one.limit_bytes for one in devices}
        self.models = {one.model: one for one in models}
        self.settings = settings or PlacementSettings()
        self.slots = slots
        self.now = 0.0
        self.replicas: list[FakeReplica] = []
        self.waiting: dict[str, list[Waiting]] = {model: [] for model in self.models}
        self.waited: list[tuple[str, str, float]] = []
        self.rates = {model: UseRate() for model in self.models}
        self.saturated: dict[str, float] = {}
        self.loads: list[tuple[float, str, str]] = []
        self.evictions: list[tuple[float, str, str, str | None]] = []
        self.failures: dict[str, int] = {}
        self.broken: dict[str, float] = {}
        self.decided: list[Decision] = []
        self.chance = random.Random(1)
        for device in self.limits:
            self.ledger.observe(device, 0)

    def add(self, model: str, klass: str = "medium", run_s: float = 1.0, times: int = 1) -> None:
        for _ in range(times):
            self.waiting[model].append(Waiting(klass, self.now, run_s))
        self.rates[model].used(self.now, times)

    def go(self, seconds: float, step: float = 0.25) -> None:
        """Let so much time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self.step()

    def idle(self) -> bool:
        return not any(self.waiting.values()) and not any(one.runs for one in self.replicas)

    def step(self) -> None:
        self._end_runs()
        self._start_runs()
        self.decided = decide(self.now, self.views(), self.replica_views(), self.ledger, self.settings)
        for decision in self.decided:
            self._carry_out(decision)
        for device, limit in self.limits.items():
            foreign = self.ledger.foreign_bytes(device)
            assert self.ledger.over_bytes(device) == max(0, self.ledger.reserved_bytes(device) + foreign - limit)
            assert self.ledger.reserved_bytes(device) <= limit

    # -- what placement sees

    def views(self) -> list[ModelView]:
        return [self._view(view) for view in self.models.values()]

    def _view(self, view: ModelView) -> ModelView:
        waiting = self.waiting[view.model]
        counts = {klass: sum(one.klass == klass for one in waiting) for klass in RANKS}
        oldest = {k: min(one.at for one in waiting if one.klass == k) for k, count in counts.items() if count}
        changes: Mapping[str, object] = {
            "demand": Demand(counts=counts, oldest=oldest, weight=float(len(waiting))),
            "broken_until": self.broken.get(view.model, float("-inf")),
            "saturated_since": self.saturated.get(view.model),
            "use_rate": self.rates[view.model].rate(self.now),
        }
        fields = {name: getattr(view, name) for name in ModelView.__dataclass_fields__}
        return ModelView(**{**fields, **changes})

    def replica_views(self) -> list[ReplicaView]:
        return [
            ReplicaView(
                model=one.model,
                replica=one.replica,
                device=one.devices[0],
                state=one.state,
                bytes={d: self.ledger.held_bytes(one.grant, d) for d in one.grant.needs},
                ready_at=one.ready_at,
                last_used_at=one.last_used_at,
                running=len(one.runs),
                klass=one.klass,
                for_model=one.for_model,
            )
            for one in self.replicas
        ]

    # -- what happens

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case PlannedLoad():
                view = self.models[decision.model]
                assert self.now >= self.broken.get(decision.model, 0)
                assert not any((r.model, r.replica) == (decision.model, decision.replica) for r in self.replicas)
                grant = self.ledger.grant(decision.model, decision.needs, self.now)
                assert grant is not None, f"{decision} was decided and does not fit"
                self.loads.append((self.now, decision.model, decision.reason))
                new = FakeReplica(
                    decision.model, decision.replica, decision.devices, grant, self.now + view.load_seconds
                )
                if self.failures.get(decision.model, 0) > 0:
                    self.failures[decision.model] -= 1
                    new.fails = True
                self.replicas.append(new)
            case Drain():
                one = self._replica(decision.model, decision.replica)
                view = self.models[decision.model]
                assert one.state == "ready"
                assert not view.pinned or decision.reason == "surplus"
                assert one.ready_at is not None
                least_s = view.load_seconds if decision.reason != "turn" else self.settings.turn_s(view)
                assert decision.reason == "desired" or self.now - one.ready_at >= least_s, "its turn was cut short"
                one.state, one.for_model = "draining", decision.for_model
                self.evictions.append((self.now, decision.model, decision.reason, decision.for_model))
            case PlannedUnload():
                one = self._replica(decision.model, decision.replica)
                assert not one.runs
                if one.state == "ready":
                    self.evictions.append((self.now, decision.model, decision.reason, decision.for_model))
                one.state, one.until, one.for_model = "unloading", self.now + UNLOAD_S, decision.for_model
            case Reserve():
                self.ledger.reserve(decision.device, decision.bytes, decision.model, decision.until, self.now)

    def _replica(self, model: str, replica: int) -> FakeReplica:
        return next(one for one in self.replicas if (one.model, one.replica) == (model, replica))

    def _end_runs(self) -> None:
        for one in list(self.replicas):
            one.runs = [run for run in one.runs if run[0] > self.now]
            if one.state == "loading" and self.now >= one.until:
                if one.fails:
                    self.ledger.release(one.grant)
                    self.replicas.remove(one)
                    self.broken[one.model] = self.now + 5
                else:
                    one.state, one.ready_at = "ready", self.now
                    for device in one.grant.needs:
                        if device not in one.devices:
                            assert self.ledger.resize(one.grant, device, 0, self.now)
            elif one.state == "unloading" and self.now >= one.until:
                self.ledger.release(one.grant)
                self.replicas.remove(one)

    def _start_runs(self) -> None:
        for model, waiting in self.waiting.items():
            waiting.sort(key=lambda one: (RANKS[one.klass], one.at))
            ready = [one for one in self.replicas if one.model == model and one.state == "ready"]
            for one, _ in itertools.product(sorted(ready, key=lambda r: len(r.runs)), range(self.slots)):
                if waiting and len(one.runs) < self.slots:
                    first = waiting.pop(0)
                    one.runs.append((self.now + first.run_s, first.klass))
                    one.klass = min((run[1] for run in one.runs), key=RANKS.__getitem__)
                    one.last_used_at = self.now
                    self.waited.append((model, first.klass, self.now - first.at))
            if ready and waiting:
                self.saturated.setdefault(model, self.now)
            else:
                self.saturated.pop(model, None)
