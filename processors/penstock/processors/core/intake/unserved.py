"""Requests for a model that this worker cannot run, while another live worker of the pool may (decisions/0084).

A request without a conversation is passed on to a partition of a worker that reports the model. If only workers of
another pool report the model, a request that names no pool is passed on to that pool, as gateways would have routed it.
All others wait here, parked, with the reason `no_worker`, until this worker serves the model. A request fails when no
live worker has reported its model for `absent_s`.

A request for a model that is served here, and whose load has failed, is passed on once within this pool, or waits in
the same way. It fails when no other worker has had the model loaded for `absent_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.processors.core.effects import Effect, Republish
from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import UNSERVED, Lane, Lanes
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.settings import Catalog
from penstock.processors.core.work.peers import Peers, Wanted
from penstock.processors.core.work.states import IN_SCHEDULER, Stage
from penstock.processors.core.work.work import Destination, Unserved, Work
from penstock.schemas.abilities import needed
from penstock.schemas.errors import ModelNotFound, PenstockError, UnsupportedParameter
from penstock.schemas.topics import TP

LOOK_EACH_S = 0.5
"""How often each waiting request is looked at."""
LOOKS_AT_ONCE = 256
"""Requests that are looked at in one tick."""
CLOCKS_DIFFER_MS = 5_000
"""The most by which the clocks of two workers are taken to differ."""


@dataclass(eq=False)
class UnservedRequests:
    """Keeps them, passes them on, and ends them. `leaves`: the record of a request is written elsewhere."""

    _registry: Registry
    _leaves: Callable[[TP, int], None]
    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _catalog: Catalog
    _peers: Peers
    _holdings: Holdings
    _endings: Endings
    _dirty: DirtySet
    _emit: Callable[[Effect], None]
    _absent_s: float
    _queue: deque[tuple[float, Work]] = field(init=False, default_factory=deque[tuple[float, Work]])

    def resolve(self, work: Work, model: str | None, payload: Mapping[str, object], wall_ms: int) -> None:
        """Choose the lane of a new request. Raises PenstockError if it can run nowhere in the pool.

        What a request lacks here another worker may have. A parameter that no live worker supports is refused at once.
        """
        need = work.need = needed(work.task, payload)
        try:
            work.lane, work.model_reason = self._catalog.resolve(work.task, model, need)
        except (ModelNotFound, UnsupportedParameter) as error:
            wanted = Wanted(work.task, model, None if need is None else need.ability)
            if model in self._peers.removed and self._other_pool(work, wanted) is None:
                raise
            if isinstance(error, UnsupportedParameter) and not self._peers.serving(wanted):
                raise
            work.lane = UNSERVED
            work.unserved = Unserved(wanted, need, error, wall_ms, wall_ms)

    def pass_on_arrival(self, work: Work) -> bool:
        """Pass a new request on. Returns False if it must wait here."""
        destination = self._destination(work)
        if destination is None or (work.conversation is not None and self._scheduler.has_turns(work.conversation)):
            return False
        self._pass_on(work, "arrive_elsewhere", destination)
        return True

    def pass_on_unloadable(self, work: Work) -> bool:
        """Pass on a request whose model is served here and cannot be loaded. Returns False if it must stay."""
        if not _may_leave(work) or work.stage not in (Stage.NEW, Stage.QUEUED, Stage.PARKED, Stage.FETCHING):
            return False
        destination = self._destination(work)
        if destination is None:
            return False
        if work.stage is Stage.NEW:
            self._pass_on(work, "arrive_elsewhere", destination)
        elif work.stage is Stage.QUEUED:
            self._holdings.leave_waiting(work)
            self._pass_on(work, "pass_on", destination)
        else:
            work.pass_to = destination
            if work.stage is Stage.PARKED:
                self._endings.fetch(work)
            self._holdings.unqueue(work)
        return True

    def keep_unloadable(self, work: Work, error: PenstockError, now: float) -> bool:
        """Let a request wait whose model cannot be loaded here. Returns False if it must end: nobody else has it."""
        lane = work.lane
        if not self.wait_for_others(work, error):
            return False
        holdings, parked = self._holdings, self._lanes[UNSERVED].parked
        if work.stage is Stage.RETRYING:
            holdings.park(work)
            work.lane = UNSERVED
            self._scheduler.put_back(work)
            self._registry.transition(work, "due", Stage.PARKED)
        else:
            if work.stage is not Stage.PARKED:
                holdings.park(work)
            self._lanes[lane].parked[work.klass] -= 1
            self._scheduler.move(work, UNSERVED)
        parked[work.klass] += 1
        self.wait(work, now)
        return True

    def wait_for_others(self, work: Work, error: PenstockError) -> bool:
        """Note that the model of a request cannot be loaded here. Returns False if no other worker may run it."""
        wanted, now_ms = Wanted(work.task, work.lane), self._peers.now_ms
        if not self._peers.may_run_elsewhere(wanted, now_ms - 1000 * self._absent_s):
            return False
        since_ms = work.unloadable_since_ms = work.unloadable_since_ms or now_ms
        work.unserved = Unserved(wanted, work.need, error, now_ms, since_ms, unloadable=True)
        return True

    def judge_anew(self, work: Work, wall_ms: int) -> None:
        """A request has waited for its time to start: what was known of its model, and of who serves it, is old."""
        if work.unserved is None:
            if self._lanes[work.lane].served:
                return
            error = ModelNotFound(f"the model {work.lane} is not served here any more", param="model")
            ability = None if work.need is None else work.need.ability
            wanted = Wanted(work.task, work.lane if work.model_reason is None else None, ability)
            work.unserved = Unserved(wanted, work.need, error, wall_ms, wall_ms)
            work.lane = UNSERVED
        work.unserved.arrived_ms = work.unserved.absent_since_ms = wall_ms

    def wait(self, work: Work, now: float) -> None:
        """The request is parked on the lane of those that are not served."""
        self._queue.append((now + LOOK_EACH_S, work))

    def fetched(self, work: Work) -> None:
        """The bytes of a request that is to be passed on are here."""
        assert work.pass_to is not None
        self._pass_on(work, "fetched_to_pass", work.pass_to)

    def _destination(self, work: Work) -> Destination | None:
        """Where its model is served: in this pool if it is served in both."""
        if (partition := self._partition(work)) is not None:
            return Destination(partition)
        unserved = work.unserved
        if unserved is None or unserved.unloadable or self._peers.serving(unserved.wanted):
            return None
        pool = self._other_pool(work, unserved.wanted)
        return None if pool is None else Destination(pool=pool)

    def _other_pool(self, work: Work, wanted: Wanted) -> str | None:
        return None if work.names_pool else self._peers.other_pool(wanted)

    def _partition(self, work: Work) -> int | None:
        """The partition of a worker of this pool. A turn of a conversation stays where the conversation is.

        A request that was moved before is passed on by newer knowledge alone, and never because of a failed load: two
        workers could exchange it for ever.
        """
        unserved, since_ms = work.unserved, float("-inf")
        if work.conversation_id is not None:
            return None
        if unserved is not None and unserved.unloadable and not _may_leave(work):
            return None
        if unserved is not None and work.key != work.first_key:
            since_ms = unserved.arrived_ms + CLOCKS_DIFFER_MS
        wanted = Wanted(work.task, work.lane) if unserved is None else unserved.wanted
        return self._peers.partition_for(wanted, work.key[0], work.request_id, since_ms)

    def _pass_on(self, work: Work, event: str, destination: Destination) -> None:
        """Publish the record there, with its id and origin. If that record comes back to this worker it is new work."""
        self._leaves(work.tp, work.key[2])
        self._registry.transition(work, event, Stage.MOVING)
        work.pass_to = destination
        work.repeats += work.silent_repeats
        self._emit(Republish(work.subject, destination.partition, work.first_place, destination.pool))

    def tick(self, now: float) -> None:
        for _ in range(LOOKS_AT_ONCE):
            if not self._queue or self._queue[0][0] > now:
                return
            _, work = self._queue.popleft()
            if work.stage in IN_SCHEDULER and work.end_with is None and work.pass_to is None:
                self._look(work, now)

    def _look(self, work: Work, now: float) -> None:
        unserved = work.unserved
        if unserved is None or self._is_served_now(work, now):
            return
        destination = self._destination(work)
        if unserved.wanted.model in self._peers.removed and destination is None:
            self._endings.end_waiting(work, "lane_failed", unserved.error, now)
            return
        if destination is not None and work.stage is Stage.PARKED and self._scheduler.eligible(work):
            work.pass_to = destination
            if work.conversation is not None:  # the next turn follows it, also if its bytes are read sooner
                self._holdings.hold_conversation(work)
            self._endings.fetch(work)
            return
        peers = self._peers
        if unserved.unloadable:
            # A worker that has not loaded the model may be unable to: its report alone must not keep this for ever.
            seen_ms = peers.loaded_elsewhere_ms(unserved.wanted)
            self._size_again(self._lanes[unserved.wanted.model or UNSERVED])
        else:
            seen_ms = peers.now_ms if peers.serving(unserved.wanted) else 0
        unserved.absent_since_ms = max(unserved.absent_since_ms, seen_ms)
        if unserved.unloadable:
            work.unloadable_since_ms = unserved.absent_since_ms
        if peers.now_ms - unserved.absent_since_ms >= 1000 * self._absent_s:
            self._endings.end_waiting(work, "lane_failed", unserved.error, now)
            return
        self.wait(work, now)

    def _size_again(self, lane: Lane) -> None:
        """A model that fits nowhere may be changed meanwhile, or its devices."""
        if lane.served and lane.never_fits is not None and not lane.wanted:
            lane.wanted = True
            self._dirty.look_at(lane)

    def _is_served_now(self, work: Work, now: float) -> bool:
        """Whether the models of this worker have changed: the request then waits for its model as others do.

        So it does when a load that failed may be tried again: placement makes room for a model by who waits for it. If
        the load fails once more, the request comes back here.
        """
        unserved = work.unserved
        assert unserved is not None
        try:
            name, reason = self._catalog.resolve(work.task, unserved.wanted.model, unserved.need)
        except PenstockError:
            return False
        lane = self._lanes[name]
        if work.stage is not Stage.PARKED or (unserved.unloadable and not _may_load(lane, now)):
            return False
        if not unserved.unloadable:
            work.model_reason = reason
        if lane.ready:
            work.unloadable_since_ms = None
        work.unserved = None
        self._lanes[UNSERVED].parked[work.klass] -= 1
        lane.parked[work.klass] += 1
        self._scheduler.move(work, name)
        self._dirty.look_at(lane)
        return True

    def next_due(self) -> float | None:
        return self._queue[0][0] if self._queue else None


def _may_load(lane: Lane, now: float) -> bool:
    """Whether the model of a request is loaded, or its load may be tried again. One that fits nowhere is not."""
    failed = lane.fail_error is not None or lane.never_fits is not None or now < lane.not_before
    return bool(lane.ready) or (lane.served and not failed)


def _may_leave(work: Work) -> bool:
    """Whether a request whose model cannot be loaded may be passed on: it was never moved, and no run of it began."""
    return work.key == work.first_key and work.started_at is None and work.history is None and not work.put_backs
