"""Requests whose attempt failed and that wait until their next one is due."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from penstock.processors.core.agenda import Agenda
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.endings import Endings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.retries import Retry, RetryDecision, ask_store_again, decide
from penstock.processors.core.requests.states import Stage
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.requests.work import Work
from penstock.schemas.errors import PenstockError, StoreUnavailable

RETRIES_AT_ONCE = 256
"""Retries that are looked at in one tick: a flood that fails together must not hold up the event loop."""


@dataclass(eq=False)
class RetryQueue:
    """Ordered by the time when they are due. Who left `RETRYING` meanwhile stays in it until then, and is skipped."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _statuses: Statuses
    _endings: Endings
    _agenda: Agenda
    _least_delay_s: float
    _queue: list[tuple[float, int, Work]] = field(init=False, default_factory=list[tuple[float, int, Work]])

    def decide(self, work: Work, error: PenstockError, now: float) -> RetryDecision:
        """What follows a failed attempt. The work notes the failure and, unless the store caused it, the attempt."""
        if isinstance(error, StoreUnavailable):
            decision = ask_store_again(work.store_refusals)
            work.store_refusals += 1
        else:
            decision = decide(error, work.spent, work.max_attempts, now, None)
            work.store_refusals = 0
        if isinstance(decision, Retry):
            work.failure = error.message
            work.spent += decision.spends
        return decision

    def add(self, work: Work, delay_s: float, now: float) -> None:
        """It is due after `delay_s`, or at its deadline if that comes first."""
        due = now + max(delay_s, self._least_delay_s)
        if work.deadline is not None:
            due = min(due, work.deadline)
        heapq.heappush(self._queue, (due, work.seq, work))

    def tick(self, now: float) -> None:
        """Put back into the scheduler what is due."""
        for _ in range(RETRIES_AT_ONCE):
            if not self._queue or self._queue[0][0] > now:
                return
            _, _, work = heapq.heappop(self._queue)
            if work.stage is not Stage.RETRYING:
                continue
            if work.deadline is not None and work.deadline <= now:
                self._endings.expire_waiting(work, now)
            else:
                self._scheduler.put_back(work)
                self._registry.transition(work, "due", Stage.QUEUED)
                self._statuses.say(work, "queued", now)
                self._agenda.look_at(self._lanes[work.lane])

    def next_due(self) -> float | None:
        """When the next retry is due."""
        return self._queue[0][0] if self._queue else None

    def waiting(self, model: str) -> list[Work]:
        """Requests for a model that wait for their next attempt."""
        return [work for _, _, work in self._queue if work.lane == model and work.stage is Stage.RETRYING]
