"""What is loaded, drained and unloaded when: placement's decisions carried out, and what operators want of models."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from penstock.processors.core import fleet as plan
from penstock.processors.core.effects import Load, Size, Unload
from penstock.processors.core.explaining import LaneFacts
from penstock.processors.core.fleet import HOST
from penstock.processors.core.heads import Heads
from penstock.processors.core.lane import Lane, RunWant
from penstock.processors.core.ledger import DeviceCapacity
from penstock.processors.core.placement import decide
from penstock.processors.core.replica import Replica, ReplicaState
from penstock.processors.core.residents import ModelSpec
from penstock.processors.core.run_memory import Head, held_by_runs, run_bytes
from penstock.processors.core.work import Work
from penstock.schemas.records import WaitingFor
from penstock.schemas.topics import CLASSES

TOLD_WAITING = 64
"""So many of those who wait for a model are told what they wait for."""
ENDINGS_IN_ALL = 8192
"""Ends under way at which nothing more starts: the broker is away or slow."""
PLAN_EACH_S = 0.1
"""How often placement is asked while something waits and nothing has changed."""
WATCH_S = 0.5
LARGEST_OF_HOST = 2
"""Weights on their way to a card are booked with such a part of main memory at most."""


class Placing(Heads):
    """Views of lanes and replicas go into `placement.decide`; its decisions become effects."""

    # -- what is wanted

    def configure(self, models: Mapping[str, ModelSpec], now: float) -> None:
        """The models that are served from now on; those that are not named any more are unloaded, and take no more."""
        for name, spec in models.items():
            lane = self.lane(name)
            if lane.spec != spec:
                if _sized_by(lane.spec) != _sized_by(spec):
                    lane.size_due = True
                lane.spec, lane.never_fits = spec, None
                lane.too_small.clear()
            lane.served = True
        for lane in self.lanes.values():
            if lane.name not in models and lane.served:
                lane.served, lane.wanted = False, False
        self._all_dirty()
        self._plan_soon()

    def want(self, name: str) -> None:
        """Load the model when there is room for it, whether somebody waits for it or not."""
        lane = self.lane(name)
        lane.wanted = True
        self._plan_soon()
        self._mark_changed(lane)

    def desire(self, model: str, loaded: bool | None, pinned: bool | None, revision: int = 0) -> None:
        """What an operator wants: loaded, or unloaded until somebody asks for it; pinned or not. None: no matter."""
        lane = self.lane(model)
        lane.unload_due = loaded is False and lane.desired is not False
        lane.desired, lane.pinned = loaded, pinned
        if loaded:
            for number in list(lane.replicas):
                self.undo_drain(model, number)
        if loaded is False:
            lane.wanted = False
        self._plan_soon()
        self._mark_changed(lane)

    def pause(self, kind: str, name: str, paused: bool) -> None:
        """Nothing new starts of a model, or of a class, until it is resumed. Raises ValueError for another kind."""
        if kind == "model":
            self.lane(name).paused = paused
        elif kind == "class" and name in CLASSES:
            others = self.scheduler.paused - {name}
            self.scheduler.paused = others | {name} if paused else others
        else:
            raise ValueError(f"neither a model nor a class: {kind} {name}")
        self._all_dirty()
        self._plan_soon()

    # -- one model

    def _fill_or_load(self, lane: Lane, now: float) -> None:
        if lane.fail_error is not None and self._fail_waiting(lane, now):
            self._touch_later(lane)
        if self._ends_under_way >= ENDINGS_IN_ALL or lane.paused:
            return
        if lane.ready:
            lane.asked_for = False
            self.starter.fill(lane, now)
            if self.starter.memory.head_left:
                self._plan_soon()
            elif lane.run_wants:
                self._plan_later(now)
            return
        waited_for = lane.name in self.scheduler.lanes()
        if not (waited_for or lane.wanted):
            return
        if not lane.spec.devices:
            self._load_weightless(lane, now)
        elif waited_for and lane.never_fits is not None and lane.fail_error is None:
            self._load_is_hopeless(lane, lane.never_fits, now)  # a turn of a conversation, whose turn came after that
            self._touch_later(lane)
        elif lane.size_due:
            self._size(lane, now)
        elif waited_for and not lane.asked_for:
            self._plan_soon()
        else:
            self._plan_later(now)
        lane.asked_for = waited_for
        if waited_for:
            self._tell_waiting(lane, now)

    def loading_progressed(self, model: str, fraction: float, now: float) -> None:
        """So much of the model's download is there, from 0 to 1: who waits for it hears so."""
        for work in itertools.islice(self.scheduler.candidates(model, now), TOLD_WAITING):
            self.statuses.say_at_once(work, "loading_model", f"loading_model {fraction:.0%}")

    def _tell_waiting(self, lane: Lane, now: float) -> None:
        status = "waiting_for_memory" if lane.short else "loading_model"
        for work in itertools.islice(self.scheduler.candidates(lane.name, now), TOLD_WAITING):
            self.statuses.say(work, status, now)

    def _size(self, lane: Lane, now: float) -> None:
        if not lane.sizing and now >= lane.not_before and lane.served:
            lane.sizing = True
            self._emit(Size(lane.name))

    def _load_weightless(self, lane: Lane, now: float) -> None:
        """It takes no memory of this machine."""
        up = sum(one.state in (ReplicaState.READY, ReplicaState.LOADING) for one in lane.replicas.values())
        if up < max(1, lane.spec.min_replicas) and now >= lane.not_before and lane.served:
            self._load(lane, Replica(lane.name, lane.next_number()), now)

    def _load(self, lane: Lane, replica: Replica, now: float) -> None:
        lane.add(replica, now)
        lane.short = False
        self._emit(Load(lane.name, replica.number, replica.device, replica.bytes, replica.devices))

    # -- all models together

    def _plan_later(self, now: float) -> None:
        """Something waits; placement need not be asked each time that it is looked at."""
        if now - self._planned_at >= PLAN_EACH_S:
            self._plan_due = True

    def _plan(self, now: float) -> None:
        """Ask placement what to do, and do it."""
        self._plan_due, self._planned_at = False, now
        for want in list(self._misplaced()):
            self._put_elsewhere(want, now)
        self._choose_heads(now)
        heads = {head.owner: head for head in self.starter.memory.heads.values()}
        self._undo_needless_drains(heads)
        self._cancel_needless_reservations(heads)
        models: list[plan.ModelView] = []
        for lane in self.lanes.values():
            if lane.needs is not None:  # its replicas hold memory also while it is to be sized again
                models.append(self._view(lane, now))
            if lane.size_due and lane.spec.devices and self._is_wanted(lane):
                self._size(lane, now)
            if not lane.spec.devices:
                self._plan_weightless(lane, now)
        models += self._head_views()
        replicas = [
            self._replica_view(replica)
            for lane in self.lanes.values()
            if lane.needs is not None
            for replica in lane.replicas.values()
            if replica.device is not None
        ]
        for decision in decide(now, models, replicas, self.ledger, self._placement):
            self._carry_out(decision, heads, now)
        for lane in self.lanes.values():
            lane.short = bool(
                lane.needs is not None
                and not lane.size_due
                and not lane.ready
                and not lane.loading
                and now >= lane.not_before
                and self._is_wanted(lane)
                and self._booked(lane)
            )

    def _put_elsewhere(self, want: RunWant, now: float) -> None:
        """It can never run where it waits: on another replica, on another device, or nowhere."""
        work, replica = want.work, want.replica
        lane = self.lane(work.lane)
        assert replica.device is not None
        # Of what it takes here: only a larger device is better, so that the largest is never taken for too small.
        need = self.starter.memory.own_bytes(replica) + run_bytes(replica, work)
        others = [one for one in self._candidate_devices(lane) if one.device != replica.device]
        if any(self.starter.memory.fits_ever(one, work) for one in lane.ready):
            if work.group is not None and replica.exclusive is work.group:
                replica.exclusive = None  # it would be prepared there again, for ever
            if work.run is not None:
                self.starter.take_from_its_replica(lane, work)
        elif any(need <= one.limit_bytes for one in others):
            lane.too_small.add(replica.device)
            self._drain(lane, replica, "too_small", None)
        else:
            largest = max([*others, *self._here(replica)], key=lambda one: one.limit_bytes)
            error = self.ledger.insufficient(f"{lane.name} with this run", {largest.device: need})
            if work.run is not None:
                self.starter.take_from_its_replica(lane, work)
            self._end_waiting(work, "lane_failed", error, now)
        self._mark_changed(lane)

    def _here(self, replica: Replica) -> list[DeviceCapacity]:
        return [one for one in self.ledger.devices() if one.device == replica.device]

    def _undo_needless_drains(self, heads: Mapping[str, Head]) -> None:
        """Nobody waits for the room of what is being drained any more."""
        for lane in self.lanes.values():
            for replica in list(lane.replicas.values()):
                owner = replica.ending_for
                if replica.state is ReplicaState.DRAINING and owner is not None and not self._still_wants(owner, heads):
                    self.undo_drain(lane.name, replica.number)

    def _cancel_needless_reservations(self, heads: Mapping[str, Head]) -> None:
        for owner in [owner for owner in self._reserved_for if not self._still_wants(owner, heads)]:
            self._reserved_for.discard(owner)
            self.ledger.cancel_reservations(owner)

    def _still_wants(self, owner: str, heads: Mapping[str, Head]) -> bool:
        """Whether a model, or the run that is a device's head, still waits for memory."""
        lane = self.lanes.get(owner)
        if lane is None:
            return owner in heads
        return not lane.ready and not lane.loading and self._is_wanted(lane)

    def _is_wanted(self, lane: Lane) -> bool:
        return lane.is_pinned or lane.wanted or lane.desired is True or self._demand(lane).counts != {}

    def _carry_out(self, decision: plan.Decision, heads: Mapping[str, Head], now: float) -> None:
        head = heads.get(decision.model)
        if isinstance(decision, plan.Reserve):
            if self.ledger.reserve(decision.device, decision.bytes, decision.model, decision.until, now):
                self._reserved_for.add(decision.model)
            return
        if head is not None:
            self._mark_changed(self.lane(head.replica.model))  # the memory of its run is free
            return
        lane = self.lane(decision.model)
        if isinstance(decision, plan.Load):
            if decision.replica in lane.replicas:
                return  # it got one in this round already
            grant = self.ledger.grant(lane.name, decision.needs, now)
            if grant is not None:
                self._load(lane, Replica(lane.name, decision.replica, grant, decision.devices), now)
            return
        replica = lane.replicas.get(decision.replica)
        if replica is None:
            return
        if isinstance(decision, plan.Drain):
            self._drain(lane, replica, decision.reason, decision.for_model)
        else:
            self._unload(lane, replica, decision.reason, decision.for_model)

    def _drain(self, lane: Lane, replica: Replica, reason: str, for_model: str | None) -> None:
        """What runs may end; nothing new starts. What was only prepared there goes elsewhere, or waits."""
        replica.state, replica.reason, replica.ending_for = ReplicaState.DRAINING, reason, for_model
        lane.count_ready()
        for work in list(replica.ahead):
            self.starter.take_from_its_replica(lane, work)
        self._mark_changed(lane)

    def undo_drain(self, model: str, number: int) -> bool:
        """Let a draining replica take runs again; False when it does not drain."""
        lane = self.lane(model)
        replica = lane.replicas.get(number)
        if replica is None or replica.state is not ReplicaState.DRAINING:
            return False
        replica.state, replica.reason, replica.ending_for = ReplicaState.READY, None, None
        self._one_for_suspects(lane, replica)
        lane.count_ready()
        self._plan_soon()
        self._mark_changed(lane)
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

    def _unload(self, lane: Lane, replica: Replica, reason: str, for_model: str | None) -> None:
        if replica.state is ReplicaState.UNLOADING:
            return
        if replica.state is ReplicaState.READY:
            self._drain(lane, replica, reason, for_model)
        replica.state = ReplicaState.UNLOADING
        for_model = for_model or replica.ending_for
        self.evictions += for_model is not None
        if len(lane.replicas) == 1:
            lane.wanted = lane.unload_due = False
        self._emit(Unload(lane.name, replica.number, replica.reason or reason, for_model))

    def _plan_weightless(self, lane: Lane, now: float) -> None:
        """Of models that take no memory only what an operator wants counts."""
        if lane.unload_due or not lane.served:
            for replica in list(lane.replicas.values()):
                if replica.idle and replica.state in (ReplicaState.READY, ReplicaState.DRAINING):
                    self._unload(lane, replica, "desired", None)
                elif replica.state is ReplicaState.READY:
                    self._drain(lane, replica, "desired", None)
        elif (lane.desired is True or lane.is_pinned or lane.wanted) and not lane.paused:
            self._load_weightless(lane, now)

    # -- views

    def _view(self, lane: Lane, now: float) -> plan.ModelView:
        needs = lane.needs
        assert needs is not None
        spec = lane.spec
        booked, host_bytes = self._booked(lane), self._through_host(needs.host_bytes)
        fits = self._fits_now(lane, booked, now)
        up = sum(one.state in (ReplicaState.READY, ReplicaState.LOADING) for one in lane.replicas.values())
        desired = lane.desired is True or None
        runs_wait = any(head.replica.model == lane.name for head in self.starter.memory.heads.values())
        # A second replica gives way to a run that needs the memory; the model itself does not.
        least = 0 if spec.min_replicas < 2 or not up or runs_wait else min(spec.min_replicas, up + fits)
        return plan.ModelView(
            model=lane.name,
            needs={
                name: plan.Need(bytes=booked, host_bytes=0 if name == HOST else host_bytes, devices=spec.count)
                for name in self._large_enough(lane)
            },
            load_seconds=lane.load_seconds,
            run_seconds=lane.run_s,
            priority=spec.priority,
            pinned=lane.is_pinned and lane.served,
            preload=fits and lane.wanted and not up,  # it takes free memory, and nobody's place
            keep_alive_s=spec.keep_alive_s,
            min_replicas=least,
            max_replicas=max(spec.max_replicas, spec.min_replicas),
            desired_loaded=False if lane.unload_due or not lane.served else desired,
            paused=lane.paused,
            broken_until=plan.NEVER if lane.size_due else lane.not_before,
            saturated_since=lane.saturated_since,
            use_rate=lane.uses.rate(now),
            demand=plan.Demand() if lane.never_fits is not None else self._demand(lane),
        )

    def _through_host(self, weights_bytes: int) -> int:
        """Main memory for weights on their way to a card; of large ones the kernel takes back pages meanwhile."""
        limit = next((one.limit_bytes for one in self.ledger.devices() if one.device == HOST), 0)
        return min(weights_bytes, limit // LARGEST_OF_HOST)

    def _large_enough(self, lane: Lane) -> list[str]:
        """Names or kinds of devices on which it may be loaded, the preferred first."""
        if not lane.too_small:
            return list(lane.spec.devices)
        names = dict.fromkeys(one.device for one in self._candidate_devices(lane) if one.device not in lane.too_small)
        return list(names) or list(lane.spec.devices)

    def _fits_now(self, lane: Lane, need_bytes: int, now: float) -> bool:
        devices = self._candidate_devices(lane)
        return lane.spec.count <= sum(
            need_bytes <= self.ledger.free_bytes(one.device, lane.name, now) for one in devices
        )

    def _replica_view(self, replica: Replica) -> plan.ReplicaView:
        grant = replica.grant
        never = float("-inf")
        return plan.ReplicaView(
            model=replica.model,
            replica=replica.number,
            device=replica.device or "",
            state=replica.state.value,
            bytes={}
            if grant is None
            else {device: self.ledger.comes_back_bytes(grant, device) for device in grant.needs},
            ready_at=None if replica.ready_at == float("inf") else replica.ready_at,
            last_used_at=None if replica.last_used == never else replica.last_used,
            running=len(replica.holders),
            queued_for_it=len(replica.ahead),
            klass=replica.most_urgent(),
            for_model=replica.ending_for,
            run_bytes=held_by_runs(replica),
        )

    # -- told to others

    def _lane_facts(self, work: Work) -> LaneFacts:
        lane = self.lane(work.lane)
        need_bytes, device, ready = None, None, bool(lane.ready)
        if ready:
            own = (want for want in lane.run_wants.values() if want.work is work)
            if (want := self.starter.memory.heads.get(work) or next(own, None)) is not None:
                need_bytes, device = want.need_bytes, want.device
        elif lane.short and lane.needs is not None:
            need_bytes = self._booked(lane)
            devices = sorted(self._candidate_devices(lane), key=lambda one: -self.ledger.free_bytes(one.device))
            device = devices[: lane.spec.count][-1].device if devices else None  # the one that is shortest of those
        return LaneFacts(
            ready=ready,
            slots=sum(one.slots for one in lane.ready),
            busy=sum(len(one.holders) for one in lane.ready),
            paused=lane.paused or work.klass in self.scheduler.paused,
            memory_short=need_bytes is not None or (ready and work.blocked_at is not None),
            loading_since=lane.load_span[0] if lane.loading else None,
            need_bytes=need_bytes,
            free_bytes=None if device is None else self.ledger.free_bytes(device),
        )

    def waiting_for(self, work: Work, now: float) -> WaitingFor:
        """Why a request that waits does not run yet."""
        return self.explainer.explain(work, now)

    def paused(self) -> list[str]:
        """Classes and models of which nothing new starts."""
        classes = [f"class/{klass}" for klass in CLASSES if klass in self.scheduler.paused]
        return classes + [f"model/{lane.name}" for lane in self.lanes.values() if lane.paused]

    def reason_of(self, lane: Lane) -> str | None:
        """Why a model has no replica that takes runs; None when nobody wants one."""
        if lane.never_fits is not None:
            return str(lane.never_fits)
        if lane.failures:
            return f"{lane.failures} loads in a row failed"
        if lane.short:
            return "it waits for memory"
        return None

    def idle_in_spite_of_work(self, now: float) -> float:
        """Seconds for which work has waited for a model that would fit into free memory, and nothing was admitted."""
        return 0.0 if self._idle_since is None else now - self._idle_since

    def _watch_idleness(self, now: float) -> None:
        fits = not self.starter.on_lanes and any(
            lane.name in self.scheduler.lanes()
            and not (lane.paused or lane.loading or lane.sizing)
            and now >= lane.not_before
            and not self._runs_lack_memory(lane)
            and (bool(lane.ready) or lane.size_due or self._fits_now(lane, self._booked(lane), now))
            for lane in self.lanes.values()
        )
        if not fits:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    # -- time

    def _look_at_fleet(self, now: float) -> None:
        """What is due by time: keep-alive, the next try of a load, a replica more for what is saturated."""
        for lane in self.lanes.values():
            full = bool(lane.ready) and not any(one.free_slots > 0 for one in lane.ready)
            if not full or lane.name not in self.scheduler.lanes():
                lane.saturated_since = None
            elif lane.saturated_since is None:
                lane.saturated_since = now
        self._plan_later(now)
        if now - self._watched_at >= WATCH_S:
            self._watched_at = now
            self._watch_idleness(now)


def _sized_by(spec: ModelSpec) -> tuple[object, ...]:
    return spec.devices, spec.count, spec.source, spec.dtype, spec.options
