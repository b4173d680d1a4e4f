"""Whether what a waiting request says it waits for is true, judged by what the simulator itself knows.

A reason that is false for longer than `GRACE_S` is a violation: it is stated wrongly, or it is over and the request
does not start although nothing else holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.processors.core.fleet.lane import UNSERVED
from penstock.processors.core.work.states import ENDING, IN_SCHEDULER, ON_LANE, Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.records import WaitingFor
from simulation.truth import Violation

if TYPE_CHECKING:
    from simulation.workers import Life

GRACE_S = 1.0
"""Ticks, a placement each 0.1 s, and the half second in which a conversation waits for the replica that knows it."""
LOOK_EACH_S = 0.1
LONGEST_GAP_S = 0.5
"""A worker that was not looked at for longer was stopped: its requests could not start meanwhile."""
AT_ONCE = 8
"""So many requests more at each look, by turns."""
LONGEST_BACKOFF_S = 31.0
"""After a load that failed, or an engine that died, the next load begins within this time."""
HALF_LIVES = 16
"""After so many, urgent work that has ended keeps no slot free any more."""
WAITS = IN_SCHEDULER | {Stage.SCHEDULED}
RANK = {"high": 0, "medium": 1, "low": 2}


class Reasons:
    """Looks at the waiting requests of one worker."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._inside = life.inside
        self._world = life.world
        self._false_since: dict[Work, tuple[float, str]] = {}
        self._looked_at = float("-inf")
        self._next = 0
        self._last_start: dict[str, float] = {}
        self._last_urgent: dict[str, float] = {}
        self._inside.before_each_grant(lambda lane, replica, work, now: self._starts(work, now))

    def _starts(self, work: Work, now: float) -> None:
        self._last_start[work.lane] = now
        self._false_since.pop(work, None)

    def look(self) -> None:
        """The worker has handled an event."""
        now, life = self._world.now, self._life
        gap = now - self._looked_at
        if gap < LOOK_EACH_S:
            return
        self._looked_at = now
        if gap > LONGEST_GAP_S or life.stopping:
            self._false_since.clear()
        if life.stopping:
            return
        for work in self._chosen():
            self._judge(work, now)

    def _chosen(self) -> list[Work]:
        """Those whose reason was false at the last look, and some of the others."""
        waiting = [work for work in self._inside.works() if work.stage in WAITS]
        for work in [work for work in self._false_since if work.stage not in WAITS]:
            del self._false_since[work]
        self._next = self._next + AT_ONCE if self._next + AT_ONCE < len(waiting) else 0
        others = waiting[self._next : self._next + AT_ONCE]
        return list(dict.fromkeys([*self._false_since, *others]))

    def _judge(self, work: Work, now: float) -> None:
        if work.end_with is not None:
            return  # its bytes are read again, to end with them
        waiting = self._life.flow.waiting_for(work, now)
        why = self.falsehood(work, waiting, now)
        if why is None:
            self._false_since.pop(work, None)
            return
        since, _ = self._false_since.setdefault(work, (now, why))
        if now - since > GRACE_S:
            raise Violation(
                f"reason: {self._life.name} {work} of {work.lane} ({work.klass}) has waited for {waiting.reason} for "
                f"{now - since:.1f} s, and {why}"
            )

    def falsehood(self, work: Work, waiting: WaitingFor, now: float) -> str | None:
        """Why its reason is not true; None when it is."""
        told = self._life.told
        if waiting.reason == "scheduled":
            return None if self._world.wall_ms < (work.start_after_ms or 0) else "its time has come"
        if work.lane == UNSERVED and waiting.reason == "no_worker":
            return "its model is served here" if work.request.model in told.served else None
        if work.pass_to is not None:
            return None if waiting.reason == "no_worker" else "it is on its way to another worker"
        if work.lane not in told.served and work.lane != UNSERVED:
            return "its model is not served any more"
        match waiting.reason:
            case "paused":
                return None if told.pauses(work.lane, work.klass) else "neither its model nor its class is paused"
            case "conversation":
                return None if self._behind_another_turn(work) else "no other turn is before it"
            case "model_loading":
                return self._is_not_loaded(work, now)
            case "memory":
                return self._has_memory(work, waiting, now)
            case "slack":
                return self._has_slack(work, now)
            case "class" | "tenant_share":
                return self._is_next(work, now)
            case other:
                return f"{other} cannot be: a worker has it"

    # -- one reason each

    def _behind_another_turn(self, work: Work) -> bool:
        return any(
            other is not work
            and other.conversation == work.conversation
            and (
                other.stage in ON_LANE
                or other.stage in ENDING
                or other.stage is Stage.RETRYING
                or (other.stage in IN_SCHEDULER and (other.seq < work.seq or other.holds_conversation))
            )
            for other in self._inside.works()
        )

    def _is_not_loaded(self, work: Work, now: float) -> str | None:
        told = self._life.told
        if self._inside.taking_replicas(work.lane):
            return "its model is loaded"
        if told.is_changing(work.lane) or now - told.failed_at.get(work.lane, -LONGEST_BACKOFF_S) < LONGEST_BACKOFF_S:
            return None
        return "nothing loads it" if not self._inside.replicas_of(work.lane) else None

    def _has_memory(self, work: Work, waiting: WaitingFor, now: float) -> str | None:
        if self._inside.outputs_fill_memory():
            return None
        if waiting.need_bytes is None:  # of the engine's own cache
            return self._fits_an_engine(work, now)
        devices = [
            device for device in self._inside.devices_for(work, now) if not self._inside.reserved_for(device, now)
        ]
        free = {device: self._free_bytes(device) for device in devices}
        enough = {device for device, size in free.items() if size >= waiting.need_bytes}
        if not enough or self._others_want_memory(work) or enough <= set(self._inside.kept_for_first(work, now)):
            return None
        return f"it needs {waiting.need_bytes} bytes, and {max(free.values())} are free"

    def _free_bytes(self, device: str) -> int:
        """Less what others were measured to use, and what each replica was granted or really holds."""
        taken = self._life.cluster.checks.foreign_bytes(self._life, device)
        for replica in self._inside.replicas():
            if device in replica.devices:
                granted = sum(grant.needs.get(device, 0) for grant in self._inside.grants_of(replica))
                taken += max(granted, self._life.engine(replica.model, replica.number).used_bytes)
        return self._inside.limit_bytes(device) - max(taken, self._inside.reserved_bytes(device))

    def _others_want_memory(self, work: Work) -> bool:
        """Of another model, or before it: their turn may be first. Or what is ending makes room."""
        told = self._life.told
        if any(told.is_changing(model) for model in told.served):
            return True
        return any(
            other is not work
            and other.stage in IN_SCHEDULER
            and self._life.flow.waiting_for(other, self._world.now).reason == "memory"
            and other.lane != work.lane
            for other in self._inside.works()
        )

    def _fits_an_engine(self, work: Work, now: float) -> str | None:
        return "an engine has room for it" if self._inside.room_for(work, now) and not self._moves(work, now) else None

    def _has_slack(self, work: Work, now: float) -> str | None:
        slack = self._life.cluster.plan.settings.slack
        if slack is None or work.klass != "low":
            return "no slack is kept from it"
        if any(holder.lane == work.lane for holder in self._inside.holders()):
            return None
        if self._urgent_waits(work):
            return None
        recent = HALF_LIVES * slack.half_life_s
        return None if now - self._last_start.get(work.lane, -recent) < recent else "nothing urgent comes"

    def _urgent_waits(self, work: Work) -> bool:
        told = self._life.told
        return any(
            other.lane == work.lane
            and other.klass != "low"
            and other.stage in IN_SCHEDULER
            and not told.pauses(other.lane, other.klass)
            and self._inside.eligible(other)
            for other in self._inside.works()
        )

    def _is_next(self, work: Work, now: float) -> str | None:
        """Its place in the order is the reason: others start before it, or all slots are taken."""
        if not self._inside.taking_replicas(work.lane):
            return "its model is not loaded"
        if work.stage in (Stage.PARKED, Stage.FETCHING, Stage.PREPARING) or not self._inside.room_for(work, now):
            return None
        if self._inside.others_must_end_first(work):
            return None
        if (alone := self._inside.alone()) is not None and alone is not work:
            return self._may_claim_the_worker(alone)
        if self._moves(work, now) or self._inside.is_paced(work, now):
            return None
        if self._life.cluster.plan.settings.slack is not None and work.klass == "low" and self._urgent_waits(work):
            return None  # whatever the urgent one waits for
        return f"{self._inside.describe_room(work)}, and nothing starts before it"

    def _may_claim_the_worker(self, alone: Work) -> str | None:
        """Who must run by itself keeps the others waiting only while it could start."""
        told = self._life.told
        if alone.stage in ON_LANE:
            return None
        if told.pauses(alone.lane, alone.klass):
            return f"{alone}, which is paused, keeps the worker"
        taking = self._inside.taking_replicas(alone.lane)
        if all(told.busy_until.get(key, 0.0) > self._world.now for key in taking):
            return f"{alone}, whose model takes nothing, keeps the worker"
        return None

    def _moves(self, work: Work, now: float) -> bool:
        """Whether others of its model run, or wait before it for a reason that is true."""
        if now - self._last_start.get(work.lane, -GRACE_S) < GRACE_S:
            return True
        told = self._life.told
        for other in self._inside.works():
            if other is work or other.lane != work.lane or other.stage not in IN_SCHEDULER:
                continue
            if told.pauses(other.lane, other.klass) or not self._inside.eligible(other):
                continue
            if other.stage in (Stage.FETCHING, Stage.PREPARING):
                return True
            if self._life.flow.waiting_for(other, now).reason == "memory":
                return True
        return False
