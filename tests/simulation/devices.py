"""A host's simulated devices: what others use of them comes and goes; what engines really hold is counted here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.processors.core import effects as ask
from penstock.processors.core.fleet import PlacementSettings
from penstock.processors.core.ledger import DeviceCapacity, Grant
from penstock.processors.core.replica import Replica
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
        self._flow = life.flow
        self._settings: PlacementSettings = life.cluster.plan.settings.placement
        self.seen: dict[str, int] = {}
        """By device that was measured in this life, what others used of it then."""
        self._runs = 0
        ledger = life.flow.ledger
        grant, start = ledger.grant, life.flow.starter._grant

        def watched(owner: str, needs: dict[str, int], now: float, *, reserved_as: str | None = None) -> Grant | None:
            given = grant(owner, needs, now, reserved_as=reserved_as)
            if given is not None:
                self._granted(owner, needs)
            return given

        def started(lane: object, work: object, replica: object, now: float) -> None:
            self._runs += 1
            start(lane, work, replica, now)  # type: ignore[arg-type]

        ledger.grant = watched
        life.flow.starter._grant = started  # type: ignore[assignment]

    def _granted(self, owner: str, needs: dict[str, int]) -> None:
        ledger = self._flow.ledger
        for device in needs:
            if device not in self.seen:
                raise Violation(f"unobserved: {owner} is granted {needs} before {device} was measured")
            taken = ledger.reserved_bytes(device) + self.seen[device]
            if taken > ledger.limit_bytes(device):
                raise Violation(
                    f"overbooked: {owner} is granted {needs}; {taken} of {ledger.limit_bytes(device)} taken"
                )

    def unloads(self, effect: ask.Unload) -> None:
        """A replica is given up: for another only when it has had its turn."""
        replica = self._flow.lane(effect.model).replicas.get(effect.replica)
        if replica is None or effect.reason not in ("turn", "class"):
            return
        resided = self._life.world.now - replica.ready_at
        took = 0.5 * (replica.ready_at - replica.load_began)
        least = max(self._settings.min_turn_s, self._settings.turn_factor * took) if effect.reason == "turn" else took
        if resided < least - 1e-6:
            raise Violation(f"hysteresis: {replica} is given up ({effect.reason}) {resided:.3f} s after it was ready")

    def look(self) -> None:
        """Each grant belongs to a replica or to a run that is there."""
        flow = self._flow
        held: list[Grant] = []
        for lane in flow.lanes.values():
            for replica in lane.replicas.values():
                held += [] if replica.grant is None else [replica.grant]
                held += self._of_runs(replica)
        if {grant.number for grant in held} != {grant.number for grant in flow.ledger.grants()}:
            raise Violation(f"leaked: granted are {flow.ledger.grants()}, held are {held}")
        turns = len(self.seen) * self._life.world.now / self._settings.min_turn_s
        if flow.lifecycle.evictions > EVICTIONS_AT_ONCE + self._runs + turns:
            raise Violation(
                f"evictions: {flow.lifecycle.evictions} in {self._life.world.now:.1f} s, with {self._runs} runs"
            )

    @staticmethod
    def _of_runs(replica: Replica) -> list[Grant]:
        return [work.run.grant for work in replica.holders if work.run is not None and work.run.grant is not None]
