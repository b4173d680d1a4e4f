"""Whether a request may start now, and if not, why not: the one place that knows.

Who starts requests asks `on` for each candidate and replica; who makes room asks `of_queue` and `of_replica`; who says
what a request waits for asks `admit`. Nothing of it is kept: a refusal holds for the moment of the question, so a
reason that is stated is never older than its statement (`docs/decisions/0044`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.processors.core.fleet.alone import AloneClaim
from penstock.processors.core.fleet.lane import UNSERVED, Lane, Lanes
from penstock.processors.core.fleet.ledger import Ledger
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory, run_bytes
from penstock.processors.core.queue.scheduler import LOW, Scheduler
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.work.states import IN_SCHEDULER, Stage
from penstock.processors.core.work.work import Work

MANY = 1 << 60
"""Tokens of a replica that has no limit: more than anything needs."""

Reason = Literal["class", "tenant_share", "model_loading", "memory", "conversation", "slack", "paused", "no_worker"]


class Refusal(NamedTuple):
    """Why a request does not start now: the reason that ends first of those that its callers know.

    `until`: the time, in seconds of the flow's clock, when that is over; None when an event ends it. `need_bytes` are
    missing on `device`; None when it is the engine's own cache that is short.
    """

    reason: Reason
    until: float | None = None
    need_bytes: int | None = None
    device: str | None = None


PAUSED = Refusal("paused")
BEHIND_TURN = Refusal("conversation")
NO_WORKER = Refusal("no_worker")
"""This worker does not serve its model, or cannot load it."""
LOADING = Refusal("model_loading")
SLACK = Refusal("slack")
CACHE_SHORT = Refusal("memory")
OUTPUTS = Refusal("memory")
"""Finished outputs that the broker or the store of artifacts does not take fill the memory that they may have."""
UNPREPARED = Refusal("class")
"""Its bytes or its prompt are not here yet: it has not been its turn."""
OTHERS_FIRST = Refusal("class")
"""Others run in its place, or start before it."""

UNTIL_OTHERS_END = Refusal("class", until=float("inf"))
"""It must run by itself, and others run. Nobody knows for how long."""
KEPT_FOR_SUSPECTS = Refusal("class", until=float("inf"))
"""The worker, or the replica, is kept for requests that must run beside no others. Nobody knows how long they run."""


@dataclass(eq=False)
class Admission:
    """Reads, changes nothing. Each question is about one request at one moment."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _runs: RunMemory
    _memory: DeviceMemory
    _ledger: Ledger
    _claim: AloneClaim

    def admit(self, work: Work, now: float) -> Refusal | None:
        """Why it does not start now on any replica; None when nothing but those before it keeps it."""
        lane = self._lanes[work.lane]
        refusal = self.of_queue(lane, work)
        if self._registry.stalled and refusal not in (PAUSED, BEHIND_TURN, NO_WORKER):
            return OUTPUTS
        if refusal is not None:
            return self._of_model(lane) if refusal is LOADING else refusal
        if work.alone and any(replica.holders for other in self._lanes.values() for replica in other.ready):
            return UNTIL_OTHERS_END
        short: Refusal | None = None
        untils: list[float] = []
        for replica in lane.ready:
            refusal = self.of_replica(replica, work, now)
            if refusal is not None and refusal.until is not None:
                untils.append(refusal.until)
            if refusal is None:
                tokens = replica.free_tokens
                refusal = self.on(replica, work, replica.free_slots, MANY if tokens is None else tokens, now)
            if refusal is None:
                return None
            if refusal.reason == "memory" and short is None:
                short = refusal
        if short is None and len(untils) == len(lane.ready):
            return Refusal("class", until=min(untils))
        return short or OTHERS_FIRST

    def of_queue(self, lane: Lane, work: Work) -> Refusal | None:
        """What keeps it back whatever is free: an order, its conversation, its model, what is left to urgent work."""
        scheduler = self._scheduler
        if work.pass_to is not None:
            return NO_WORKER
        if lane.paused or work.klass in scheduler.fronts.paused:
            return PAUSED
        if not scheduler.eligible(work):
            return BEHIND_TURN
        if lane.name == UNSERVED:
            return NO_WORKER
        if not lane.ready:
            return LOADING
        if scheduler.holds_back(work):
            return OTHERS_FIRST if scheduler.fronts.urgent_waits(lane.name, LOW) else SLACK
        return None

    def of_replica(self, replica: Replica, work: Work, now: float) -> Refusal | None:
        """What keeps it from this replica however much is free there."""
        if self._claim.excludes(work) or (replica.exclusive is not None and replica.exclusive is not work.group):
            return KEPT_FOR_SUSPECTS
        if now < replica.busy_until:
            return Refusal("class", until=replica.busy_until)
        return None if self.is_prepared(replica, work) else UNPREPARED

    @staticmethod
    def is_prepared(replica: Replica, work: Work) -> bool:
        """Whether its need is known to this replica, or is not asked for before it starts."""
        if work.run is not None:
            return work.stage is Stage.READY and work.run.replica == replica.number
        return replica.inline and work.stage is Stage.QUEUED and work.starts_unprepared

    def on(self, replica: Replica, work: Work, slots: int, tokens: int, now: float) -> Refusal | None:
        """Whether it may start with these slots and tokens of this replica, which are kept for no other."""
        need = 0 if work.run is None else work.run.need_tokens
        if slots <= 0:
            return OTHERS_FIRST
        if need > tokens:
            kept_for_others = replica.tokens is None or need <= replica.tokens - replica.used_tokens
            return OTHERS_FIRST if kept_for_others else CACHE_SHORT
        if replica.device is not None and (device := self._runs.short_device(replica, work, now)) is not None:
            return Refusal("memory", need_bytes=run_bytes(replica, work), device=device)
        return None

    def free_bytes(self, refusal: Refusal) -> int | None:
        """Of the device of which memory is short."""
        return None if refusal.device is None else self._ledger.free_bytes(refusal.device)

    def _of_model(self, lane: Lane) -> Refusal:
        """Why its model is not loaded. Of the devices that it needs the one with the least memory free counts."""
        if not lane.short or lane.needs is None:
            return LOADING
        candidates = [one.device for one in self._memory.candidate_devices(lane)]
        # Others than those that were found too small for one of its runs, if there are any.
        devices = [device for device in candidates if device not in lane.too_small] or candidates
        devices.sort(key=lambda device: -self._ledger.free_bytes(device))
        device = devices[: lane.spec.count][-1] if devices else None
        return Refusal("memory", need_bytes=self._memory.booked(lane), device=device)

    # -- suspects

    def has_suspects(self, lane: Lane) -> bool:
        """Whether a replica of the model is kept for suspects, of whom one waits to run there or runs."""
        return any(replica.exclusive is not None and self.is_kept(lane, replica) for replica in lane.ready)

    def is_kept(self, lane: Lane, replica: Replica) -> bool:
        """Whether one of the suspects that the replica is kept for waits to run there, or runs."""
        group = replica.exclusive
        return group is not None and any(work in replica.holders or self.may_join(lane, work) for work in group.members)

    def may_join(self, lane: Lane, work: Work) -> bool:
        """Suspects of a group run together, but for one that must run beside nobody: its turn comes by itself."""
        return not work.alone and self.is_waiting(lane, work) and self.of_queue(lane, work) is None

    def is_waiting(self, lane: Lane, work: Work) -> bool:
        """Whether it waits in the queue of this model, with no other turn of its conversation before it."""
        return work.stage in IN_SCHEDULER and work.lane == lane.name and self._scheduler.eligible(work)
