"""A host's simulated devices: what others use of them comes and goes; what engines really hold is counted here."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.core.fleet.views import PlacementSettings
from simulation.truth import Violation

if TYPE_CHECKING:
    from simulation.engines import Engine, EngineRun
    from simulation.plan import Plan
    from simulation.workers import Life

EVICTIONS_AT_ONCE = 8


class Devices:
    """The devices of a machine. They outlive its worker's processes."""

    def __init__(self, plan: Plan) -> None:
        self.capacities = [
            DeviceCapacity(device=name, kind="simulated", total_bytes=total, reserve_bytes=reserve)
            for name, total, reserve in plan.devices
        ]
        self.foreign = {one.device: 0 for one in self.capacities}

    def observed(self, engines: list[Engine]) -> dict[str, tuple[int, int]]:
        """By device: bytes in use by all, and those of our engines, as a probe tells them."""
        found: dict[str, tuple[int, int]] = {}
        for one in self.capacities:
            held = [engine for engine in engines if engine.device == one.device]
            ours = sum(engine.used_bytes for engine in held)
            found[one.device] = (ours + self.foreign[one.device], ours)
        return found


class Memory:
    """Looks at one worker's ledger: at every grant, at every unload, and now and then."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._inside = life.inside
        self._settings: PlacementSettings = life.cluster.plan.settings.placement
        self.seen: dict[str, int] = {}
        """By device that was measured in this life, what others used of it then."""
        self._shortest_load_s: dict[str, float] = {}
        """By model, of the loads that were seen. What a load takes is a mean: one that took long, while the worker
        stood still, is soon outweighed by another."""
        self._runs = 0
        self._limits = {one.device: one.total_bytes - one.reserve_bytes for one in life.host.devices.capacities}
        self._held: dict[int, dict[str, int]] = {}
        """By grant and device, the bytes that it holds: written down here as they are granted, changed and released."""
        self._measured: dict[int, dict[str, int]] = {}
        """By grant of a replica, what it was measured to use without the grants of its runs."""
        self._ours: dict[str, int] = {}
        """What all engines were measured to use, while the flow hears of it."""
        self._inside.at_each_change_of_memory(self._holds)
        self._inside.before_each_grant(self._run_begins)

    def _run_begins(self, *_: object) -> None:
        self._runs += 1

    def observed(self, observed: dict[str, tuple[int, int]]) -> None:
        """The flow is about to hear what is in use."""
        self.seen = {device: used - ours for device, (used, ours) in observed.items()}
        self._ours = {device: ours for device, (_, ours) in observed.items()}
        self._measured.clear()

    def measured(self, measured: dict[tuple[str, int], dict[str, int]]) -> None:
        """The flow has heard of it, and what each replica uses."""
        self._ours.clear()
        for (model, number), by_device in measured.items():
            replica = self._inside.replica(model, number)
            if replica is not None and replica.grant is not None:
                runs = [grant for grant in self._inside.grants_of(replica) if grant is not replica.grant]
                self._measured[replica.grant.number] = {
                    device: used - sum(self._held[grant.number].get(device, 0) for grant in runs)
                    for device, used in by_device.items()
                    if device in replica.devices
                }

    def _holds(self, number: int, owner: str, needs: dict[str, int]) -> None:
        """A grant holds so much from now on. By what it grows, no device may be filled beyond its limit."""
        held = self._held.setdefault(number, {})
        grown = [device for device, need in needs.items() if need > held.get(device, 0)]
        held.update(needs)
        if not any(held.values()):
            del self._held[number]
            self._measured.pop(number, None)
        for device in grown:
            if device not in self.seen:
                raise Violation(f"unobserved: {owner} is granted {needs} before {device} was measured")
            taken = self.seen[device] + max(self._taken(device), self._ours.get(device, 0))
            if taken > self._limits[device]:
                raise Violation(f"overbooked: {owner} holds {needs}; {taken} of {self._limits[device]} are taken")

    def starts(self, engine: Engine, run: EngineRun) -> None:
        """A run begins on an engine: what is said that it takes of the device was granted."""
        grant = None if run.work.run is None else run.work.run.grant
        granted = 0 if grant is None else self._held.get(grant.number, {}).get(engine.device or "", 0)
        replaced = self._life.cluster.plan.has("change_models")  # it may have been sized as another model
        need = run.memory if replaced else max(run.memory, engine.spec.run_bytes)
        if engine.device is not None and granted < need:
            raise Violation(f"ungranted: {run.work} takes {need} bytes of {engine.device}, and has {granted}")

    def _taken(self, device: str) -> int:
        """Of each grant what it holds, or was measured to use beyond that."""
        return sum(
            max(held.get(device, 0), self._measured.get(number, {}).get(device, 0))
            for number, held in self._held.items()
        )

    def unloads(self, effect: ask.Unload) -> None:
        """A replica is given up: for another only when it has had its turn."""
        replica = self._inside.replica(effect.model, effect.replica)
        if replica is None or effect.reason not in ("turn", "class", "stands"):
            return
        self._note_loads()
        resided = self._life.world.now - replica.ready_at
        took = 0.5 * self._shortest_load_s[replica.model]
        least = max(self._settings.min_turn_s, self._settings.turn_factor * took) if effect.reason == "turn" else took
        if effect.reason == "stands" and replica.holders:
            raise Violation(f"hysteresis: {replica} is given up because nothing runs on it, and {replica.holders} run")
        if resided < least - 1e-6:
            raise Violation(f"hysteresis: {replica} is given up ({effect.reason}) {resided:.3f} s after it was ready")

    def _note_loads(self) -> None:
        for replica in self._inside.replicas():
            if isfinite(replica.ready_at):
                load_s = replica.ready_at - replica.load_began
                self._shortest_load_s[replica.model] = min(load_s, self._shortest_load_s.get(replica.model, load_s))

    def look(self) -> None:
        """Each grant belongs to a replica or to a run that is there."""
        self._note_loads()
        inside = self._inside
        held = [grant for replica in inside.replicas() for grant in inside.grants_of(replica)]
        for device in self._limits:
            reserved = sum(one.get(device, 0) for one in self._held.values())
            if reserved != inside.reserved_bytes(device):
                raise Violation(f"reserved: {reserved} bytes of {device} are, {inside.reserved_bytes(device)} are said")
        if {grant.number for grant in held} != {grant.number for grant in inside.grants()}:
            raise Violation(f"leaked: granted are {inside.grants()}, held are {held}")
        turns = len(self.seen) * self._life.world.now / self._settings.min_turn_s
        if inside.evictions() > EVICTIONS_AT_ONCE + self._runs + turns:
            raise Violation(f"evictions: {inside.evictions()} in {self._life.world.now:.1f} s, with {self._runs} runs")
