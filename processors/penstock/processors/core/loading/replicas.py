"""Replicas coming up and going down, and what that means for the requests on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.fleet.alone import AloneClaim
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.core.fleet.measurements import Measurements
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.fleet.residents import Needs
from penstock.processors.core.fleet.views import HOST
from penstock.processors.core.loading.lane_failures import LaneFailures
from penstock.processors.core.queue.forecast import Forecast
from penstock.processors.core.runs.attempts import Attempts
from penstock.processors.core.work.retries import EngineDied
from penstock.processors.core.work.suspects import suspect_all

LIVED = 8
"""After this many runs an engine has had its peak, if its warm-up has not."""
AFTERMATH_S = 1.0
"""A death this soon after a run was stopped may be the stopped run's fault: nobody is blamed alone for it."""


@dataclass(eq=False)
class Replicas:
    """What a load that ended, or a process that ended, means for its model; and who is to blame for a death."""

    _lanes: Lanes
    _memory: DeviceMemory
    _measurements: Measurements
    _claim: AloneClaim
    _forecast: Forecast
    _attempts: Attempts
    _failures: LaneFailures
    _dirty: DirtySet
    _memory_error: Callable[[int, int], None] | None

    def sized(self, model: str, needs: Needs, now: float) -> None:
        """How much memory an engine of the model takes."""
        lane = self._lanes[model]
        if self._sized_another(lane):
            return
        lane.sizing, lane.size_due, lane.needs = False, False, needs
        lane.never_fits = self._memory.cannot_ever(lane, needs.load_bytes + needs.run_bytes)
        if lane.never_fits is not None:
            self._failures.load_is_hopeless(lane, lane.never_fits)
        self._dirty.plan_soon()
        self._dirty.look_at(lane)

    def size_failed(self, model: str, error: BaseException, now: float) -> None:
        """How much it takes could not be found out: that counts as a load that failed."""
        lane = self._lanes[model]
        if self._sized_another(lane):
            return
        lane.sizing = False
        known = lane.load_failed(error, now)
        if known is not None:
            self._failures.load_is_hopeless(lane, known)
        self._dirty.plan_soon()
        self._dirty.look_at(lane)

    def _sized_another(self, lane: Lane) -> bool:
        """Whether its entry was replaced while the former one was sized: that says nothing of this one."""
        if not lane.sizing or lane.sizing_of == lane.spec.made_of:
            return False
        lane.sizing, lane.size_due = False, True
        self._dirty.plan_soon()
        return True

    def up(
        self,
        model: str,
        number: int,
        slots: int,
        tokens: int | None,
        now: float,
        *,
        inline: bool,
        measured_bytes: int | None = None,
        peak_bytes: int = 0,
    ) -> None:
        """A replica is loaded: it runs `slots` at once, in `tokens` of cache (None: no such limit).

        `measured_bytes` and `peak_bytes`: what it holds after its warm-up, and the most that it has held.
        """
        lane = self._lanes[model]
        replica = lane.replicas.get(number)
        if replica is None:
            replica = Replica(model, number)
            lane.add(replica, now)
        if replica.state not in (ReplicaState.LOADING, ReplicaState.READY):
            return  # its end was asked for meanwhile
        replica.run_bytes = 0 if lane.needs is None or replica.grant is None else lane.needs.run_bytes
        if replica.state is ReplicaState.LOADING:
            self._forecast.loaded(model, now - replica.load_began)
        lane.up(replica, slots, tokens, inline=inline, now=now)
        self._measurements.settled(replica, now)
        if measured_bytes is not None:
            self._measurements.warmed_up(lane, replica, measured_bytes, peak_bytes, now)
        self._dirty.plan_soon()
        self._dirty.look_at(lane)

    def down(self, model: str, number: int, now: float) -> None:
        """A replica's engine died. What ran on it runs again; who killed it is found by halves."""
        lane = self._lanes[model]
        replica = lane.replicas.get(number)
        if replica is None:
            return
        victims = replica.victims()
        if replica.state in (ReplicaState.READY, ReplicaState.DRAINING):
            lane.died(now, with_work=bool(victims))
        culprit = suspect_all(victims)
        if now - replica.stopped_at <= AFTERMATH_S:
            culprit = None  # what was stopped a moment ago may be to blame: it runs again by itself
        error = EngineDied("the engine's process died while it ran")
        for work in [*replica.holders, *replica.ahead]:
            if work is not culprit:
                self._attempts.requeue(work, "replica_down", now, error)
        if culprit is not None:
            self._attempts.attempt_failed(culprit, "replica_down", error, now, again=True)
        self._removed(lane, replica, died=True)

    def gone(self, model: str, number: int, now: float) -> None:
        """A replica was unloaded, on purpose: nobody is to blame."""
        lane = self._lanes[model]
        replica = lane.replicas.get(number)
        if replica is None:
            return
        for work in [*replica.holders, *replica.ahead]:
            self._attempts.requeue(work, "replica_down", now)
        self._removed(lane, replica)

    def lives_end(self) -> None:
        """The worker stops in order: what its engines have held teaches as if each had been unloaded."""
        for lane in self._lanes.values():
            for replica in lane.replicas.values():
                self._life_ended(lane, replica)

    def _life_ended(self, lane: Lane, replica: Replica, *, died: bool = False) -> None:
        """On a card its warm-up has taught already."""
        if replica.device == HOST:
            self._measurements.learn(lane, replica, whole_life=not died and replica.runs_begun >= LIVED)

    def _removed(self, lane: Lane, replica: Replica, *, died: bool = False) -> None:
        lane.remove(replica)
        self._life_ended(lane, replica, died=died)
        if replica.peak_bytes and replica.grant is not None and self._memory_error is not None:
            self._memory_error(replica.peak_bytes, replica.booked_bytes)
        self._memory.release(replica)
        self._unset_alone(lane.name)
        self._dirty.look_at(lane)

    def limits(self, model: str, number: int, slots: int, now: float) -> None:
        """A replica's engine runs `slots` at once from now on. What runs on it in excess may end."""
        lane = self._lanes[model]
        replica = lane.replicas.get(number)
        if replica is not None:
            replica.slots = slots
            self._dirty.look_at(lane)

    def busy(self, model: str, number: int, seconds: float, now: float) -> None:
        """A replica's engine takes nothing new for so long."""
        replica = self._lanes[model].replicas.get(number)
        if replica is not None:
            replica.busy_until = max(replica.busy_until, now + seconds)

    def load_failed(self, model: str, number: int, error: BaseException, now: float) -> None:
        """A replica could not be loaded. Those who wait are failed when waiting is of no use any more."""
        lane = self._lanes[model]
        replica = lane.replicas.get(number)
        if replica is not None and (replica.state is ReplicaState.UNLOADING or lane.reason_to_end(replica)):
            self._removed(lane, replica)  # of an entry that was replaced, or a load that was ordered to end
            return
        if replica is not None and isinstance(error, OutOfMemory):
            self._measurements.ran_out(lane, replica)
        known = lane.load_failed(error, now)
        if replica is not None:
            self._removed(lane, replica)
        if known is not None:
            self._failures.load_is_hopeless(lane, known)
        self._unset_alone(model)
        self._dirty.look_at(lane)

    def _unset_alone(self, lane: str) -> None:
        holder = self._claim.holder
        if holder is not None and holder.lane == lane and not self._claim.is_running:
            self._claim.give_up()
