"""Requests whose callers named a time to start, until then (decisions/0087).

Such a request is a fact alone, outside of the scheduler: it holds up nobody, not its conversation either. At its time
it takes its place as if it came then. Its offset stays uncommitted, so it survives this worker. One that stays far
behind its partition's deliveries is written again at the end of the partition, with its id and origin: otherwise it
would hold back the commit, and after `commit_span` records the partition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from penstock.processors.core.intake.queueing import Queueing
from penstock.processors.core.intake.unserved import UnservedRequests
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.requests.explaining import Explainer
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Destination, Work
from penstock.schemas.errors import Overloaded
from penstock.schemas.topics import TP

AT_ONCE = 256
"""How many become due, or are written again, in one tick: a flood of one time must not hold up the event loop."""
SHARE_OF_SPAN, SHARE_OF_TENANT = 8, 16
"""Of the offsets that deliveries may run ahead, one in this many may be scheduled, of all tenants and of one."""


@dataclass(eq=False)
class StartTimes:
    """Times are wall-clock milliseconds where they end in `_ms`."""

    _registry: Registry
    _queueing: Queueing
    _unserved: UnservedRequests
    _statuses: Statuses
    _explainer: Explainer
    _endings: Endings
    _commit_span: int

    def refusal(self, work: Work) -> Overloaded | None:
        """Why the partition of a new request can hold no more that are to start later; None if it can.

        With more of them, those that are written again would come round again at once.
        """
        scheduled, span = self._registry.scheduled, self._commit_span
        if scheduled.comes_again(work):
            return None
        held, own = scheduled.places(work.tp), scheduled.places_of(work.tp, work.tenant)
        if held >= max(1, span // SHARE_OF_SPAN):
            return Overloaded(f"{held} requests of its partition wait for their time to start already")
        if own >= max(1, span // SHARE_OF_TENANT):
            return Overloaded(f"{own} requests of its tenant and partition wait for their time to start already")
        return None

    def hold(self, work: Work, now: float) -> None:
        """A new request may not start yet."""
        work.body = None
        self._registry.transition(work, "arrive", Stage.SCHEDULED)
        self._statuses.say(work, "queued", now)

    def tick(self, now: float, wall_ms: int, lags_below: Callable[[TP], int]) -> None:
        """Release those whose time has come, and write again those whose offset is `lags_below` or lower."""
        scheduled = self._registry.scheduled
        for _ in range(AT_ONCE):
            at_ms, work = scheduled.first()
            if work is None or at_ms > wall_ms:
                break
            self._due(work, now, wall_ms)
        for tp in scheduled.partitions():
            behind = lags_below(tp)
            if next(iter(scheduled.of_partition(tp))) <= behind:
                self._write_again(tp, behind)

    def _write_again(self, tp: TP, behind: int) -> None:
        scheduled = self._registry.scheduled
        for offset, work in list(islice(scheduled.of_partition(tp).items(), AT_ONCE)):
            if offset > behind:
                return
            scheduled.write_again(work)
            work.pass_to = Destination(tp[1])
            self._endings.fetch(work)

    def _due(self, work: Work, now: float, wall_ms: int) -> None:
        """It takes its place as if it came now, or expires."""
        if work.start_after_ms is not None and wall_ms < work.start_after_ms:
            self._endings.expire_waiting(work, now)
            return
        work.arrived_at, work.seq = now, self._registry.next_seq()
        if work.deadline_ms is not None:  # the clocks may have moved apart since it came
            work.deadline = now + (work.deadline_ms - wall_ms) / 1000
        work.pending_status = work.published_status = work.published_waiting = work.published_start_at = None
        self._unserved.judge_anew(work, wall_ms)
        self._queueing.join(work, "due", now)

    def next_due(self) -> float | None:
        at_ms, work = self._registry.scheduled.first()
        return None if work is None else self._explainer.to_clock(at_ms)
