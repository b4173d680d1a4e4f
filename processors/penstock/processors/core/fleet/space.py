"""Memory of the devices during one placement: what is free, what is coming back, and who was given what of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.views import HOST, ModelView, Need, ReplicaView


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """One way to place a replica: its devices, and the bytes that it takes of each, host memory included."""

    devices: tuple[str, ...]
    needs: Mapping[str, int]


PLANS: WeakKeyDictionary[Ledger, dict[tuple[str, Need], list[PlacementPlan]]] = WeakKeyDictionary()
"""Made once for each ledger and need: they depend on its devices alone, which never change."""
PLANS_KEPT = 1024
"""Needs that are learned, and those of runs, are always new ones."""


def _plans_of_one(ledger: Ledger, name: str, need: Need) -> list[PlacementPlan]:
    """A plan for each single device of this name or kind that could ever hold it."""
    known = PLANS.setdefault(ledger, {})
    plans = known.get((name, need))
    if plans is None:
        devices = [one.device for one in ledger.devices() if name in (one.device, one.kind)]
        plans = [PlacementPlan((device,), _needs(ledger, (device,), need)) for device in devices]
        if len(known) >= PLANS_KEPT:
            known.clear()
        plans = known[name, need] = [plan for plan in plans if ledger.fits_ever(plan.needs)]
    return plans


def _needs(ledger: Ledger, devices: Sequence[str], need: Need) -> dict[str, int]:
    needs = dict.fromkeys(devices, need.bytes)
    if need.host_bytes and HOST not in needs and any(one.device == HOST for one in ledger.devices()):
        needs[HOST] = need.host_bytes
    return needs


class Space:
    """`room`: what is free by device, less what this placement has given to somebody.

    Below zero where more is taken than the limit allows: so much must come back first.
    """

    def __init__(self, ledger: Ledger, replicas: Sequence[ReplicaView], now: float) -> None:
        self.ledger = ledger
        self.devices = [one.device for one in ledger.devices()]
        self._unknown = {device for device in self.devices if not ledger.observed(device)}
        self.room = {
            device: -1 if device in self._unknown else ledger.free_bytes(device) - ledger.over_bytes(device)
            for device in self.devices
        }
        self.kept = {device: ledger.reservation(device, now) for device in self.devices}
        self.coming = dict.fromkeys(self.room, 0)
        self.runs = dict.fromkeys(self.room, 0)
        self._run_bytes = dict.fromkeys(self.room, 0)
        """By device, what runs hold of it that end by themselves, on replicas that stay."""
        self._contested: set[str] = set()
        for replica in replicas:
            for device in self.runs.keys() & replica.devices:
                self.runs[device] += replica.running
                self._run_bytes[device] += replica.run_bytes
            if replica.state in ("draining", "unloading"):
                self.count_coming(replica)

    def count_coming(self, replica: ReplicaView) -> None:
        """What it holds comes back, and what its runs hold."""
        for device, held in replica.bytes.items():
            if device in self.coming:
                self.coming[device] += held
        for device in self.coming.keys() & replica.devices:
            self.coming[device] += replica.run_bytes
            self._run_bytes[device] -= replica.run_bytes

    def free(self, device: str, model: str) -> int:
        """What this placement may still give of a device; less what is reserved for another."""
        kept = self.kept[device]
        return self.room[device] - (0 if kept is None or kept[0] == model else kept[1])

    def fits(self, plan: PlacementPlan, model: str) -> bool:
        for device, need in plan.needs.items():
            if need > self.room[device] or need > self.free(device, model):
                return False
        return True

    def claim(self, plan: PlacementPlan, model: str, *, contest: bool = False) -> None:
        """It is this model's from now on. With `contest` nobody who comes later waits for room on these devices."""
        if contest:
            self._contested.update(plan.devices)
        for device, need in plan.needs.items():
            self.room[device] -= need
            kept = self.kept[device]
            if kept is not None and kept[0] == model:
                self.kept[device] = None

    def plans(self, view: ModelView) -> Iterator[list[PlacementPlan]]:
        """The ways to place a model that could ever fit, by its needs in their order."""
        for name, need in view.needs.items():
            plans = _plans_of_one(self.ledger, name, need)
            if need.devices > 1:
                devices = sorted(
                    (plan.devices[0] for plan in plans),
                    key=lambda device: -(self.free(device, view.model) + self.coming[device]),
                )[: need.devices]
                plan = PlacementPlan(tuple(devices), _needs(self.ledger, devices, need))
                plans = [plan] if len(devices) == need.devices else []
            yield plans

    def open_plans(self, view: ModelView) -> list[PlacementPlan]:
        """Its plans, by its first kind of device that could hold it, on devices that nobody before it waits for."""
        plans = next((plans for plans in self.plans(view) if plans), [])
        if self._contested:
            plans = [plan for plan in plans if self._contested.isdisjoint(plan.devices)]
        if self._unknown:
            plans = [plan for plan in plans if self._unknown.isdisjoint(plan.needs)]
        return plans

    def shortages(self, plan: PlacementPlan, model: str, *, runs_end: bool) -> dict[str, int]:
        """Bytes that are missing by device, once all that is ending has ended; with `runs_end` the runs of others too.

        Those end by themselves, but others follow them: unless room is kept.
        """
        runs = self._run_bytes
        missing = {
            device: need - self.free(device, model) - self.coming[device] - (runs[device] if runs_end else 0)
            for device, need in plan.needs.items()
        }
        return {device: short for device, short in missing.items() if short > 0}
