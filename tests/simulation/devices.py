"""A host's simulated devices: what others use of them comes and goes; what engines really hold is counted here."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.core.fleet.views import PlacementSettings
from simulation.truth import Violation

if TYPE_CHECKING:
    from simulation.engines import Engine
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
        self._inside.after_each_memory_grant(self._granted)
        self._inside.before_each_grant(self._run_begins)

    def _run_begins(self, *_: object) -> None:
        self._runs += 1

    def _granted(self, owner: str, needs: dict[str, int]) -> None:
        inside = self._inside
        for device in needs:
            if device not in self.seen:
                raise Violation(f"unobserved: {owner} is granted {needs} before {device} was measured")
            taken = inside.reserved_bytes(device) + self.seen[device]
            if taken > inside.limit_bytes(device):
                raise Violation(
                    f"overbooked: {owner} is granted {needs}; {taken} of {inside.limit_bytes(device)} taken"
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
        if {grant.number for grant in held} != {grant.number for grant in inside.grants()}:
            raise Violation(f"leaked: granted are {inside.grants()}, held are {held}")
        turns = len(self.seen) * self._life.world.now / self._settings.min_turn_s
        if inside.evictions() > EVICTIONS_AT_ONCE + self._runs + turns:
            raise Violation(f"evictions: {inside.evictions()} in {self._life.world.now:.1f} s, with {self._runs} runs")
