"""Sizes, loads, drains and unloads of replicas, as they are asked of the shell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.processors.core.effects import Effect, Load, Size, Unload
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.requests.granting import Grants


@dataclass(eq=False)
class Lifecycle:
    """Steps of a replica's life; when each is taken is decided elsewhere."""

    _lanes: Lanes
    _grants: Grants
    _dirty: DirtySet
    _emit: Callable[[Effect], None]
    evictions: int = field(init=False, default=0)
    """Replicas that were given up for another model, in all."""

    def size(self, lane: Lane, now: float) -> None:
        if not lane.sizing and now >= lane.not_before and lane.served:
            lane.sizing, lane.sizing_of = True, lane.spec.made_of
            self._emit(Size(lane.name))

    def load_weightless(self, lane: Lane, now: float) -> None:
        """It takes no memory of this machine."""
        up = sum(one.state in (ReplicaState.READY, ReplicaState.LOADING) for one in lane.replicas.values())
        if up < max(1, lane.spec.min_replicas) and now >= lane.not_before and lane.served:
            self.load(lane, Replica(lane.name, lane.next_number()), now)

    def load(self, lane: Lane, replica: Replica, now: float) -> None:
        lane.add(replica, now)
        lane.short = False
        self._emit(Load(lane.name, replica.number, replica.device, replica.bytes, replica.devices))

    def drain(self, lane: Lane, replica: Replica, reason: str, for_model: str | None) -> None:
        """What runs may end; nothing new starts. What was only prepared there goes elsewhere, or waits."""
        replica.state, replica.reason, replica.ending_for = ReplicaState.DRAINING, reason, for_model
        lane.count_ready()
        for work in list(replica.ahead):
            self._grants.take_from_its_replica(lane, work)
        self._dirty.look_at(lane)

    def end_ordered(self, lane: Lane) -> None:
        """Replicas that orders want ended take no run from now on. Planning unloads those that are drained.

        At the order, not at the next planning: lanes are looked at before placement is asked, so what waits would
        start on them.
        """
        for replica in list(lane.replicas.values()):
            reason = lane.reason_to_end(replica)
            if reason is not None and replica.state is ReplicaState.READY:
                self.drain(lane, replica, reason, None)
            elif reason is not None and replica.state is ReplicaState.LOADING:
                self.unload(lane, replica, reason, None)

    def undo_drain(self, model: str, number: int) -> bool:
        """Let a draining replica take runs again; False when it does not drain."""
        lane = self._lanes[model]
        replica = lane.replicas.get(number)
        if replica is None or replica.state is not ReplicaState.DRAINING:
            return False
        replica.state, replica.reason, replica.ending_for = ReplicaState.READY, None, None
        self._one_for_suspects(lane, replica)
        lane.count_ready()
        self._dirty.plan_soon()
        self._dirty.look_at(lane)
        return True

    def _one_for_suspects(self, lane: Lane, back: Replica) -> None:
        """While it was drained its group of suspects may have got another replica: two would take them from each other
        for ever. It keeps them if they run on it."""
        group = back.exclusive
        other = next((one for one in lane.ready if group is not None and one.exclusive is group), None)
        if group is None or other is None:
            return
        loser = other if any(holder.group is group for holder in back.holders) else back
        loser.exclusive = None

    def unload(self, lane: Lane, replica: Replica, reason: str, for_model: str | None) -> None:
        if replica.state is ReplicaState.UNLOADING:
            return
        if replica.state is ReplicaState.READY:
            self.drain(lane, replica, reason, for_model)
        replica.state = ReplicaState.UNLOADING
        for_model = for_model or replica.ending_for
        self.evictions += for_model is not None
        reason = replica.reason or reason  # a load has none of its own
        stays = any(one.state is not ReplicaState.UNLOADING for one in lane.replicas.values())
        if not stays and reason != "replaced":
            lane.wanted = False
        self._emit(Unload(lane.name, replica.number, reason, for_model))

    def plan_weightless(self, lane: Lane, now: float) -> None:
        """Of replicas that take no memory only what an operator wants counts.

        A model may have such ones although its entry takes memory now: they are of the entry before it.
        """
        for replica in list(lane.replicas.values()):
            reason = lane.reason_to_end(replica)
            if reason is None or replica.device is not None or replica.state is ReplicaState.UNLOADING:
                continue
            if replica.idle:
                self.unload(lane, replica, reason, None)
            elif replica.state is ReplicaState.READY:
                self.drain(lane, replica, reason, None)
        if lane.spec.devices:
            return
        if lane.desired is True or lane.is_pinned or (lane.wanted and not lane.paused):
            self.load_weightless(lane, now)
