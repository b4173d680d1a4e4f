"""Requests whose attempt failed and that wait until their next one is due."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.work.retries import Requeue, Retry, RetryDecision, RetrySettings, Tries, decide
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import PenstockError

RETRIES_AT_ONCE = 256
"""Retries that are looked at in one tick: a flood that fails together must not hold up the event loop."""


@dataclass(eq=False)
class RetryQueue:
    """Ordered by the time when they are due. Who left `RETRYING` meanwhile stays in it until then, and is skipped."""

    _registry: Registry
    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _statuses: Statuses
    _dirty: DirtySet
    _settings: RetrySettings
    _queue: list[tuple[float, int, Work]] = field(init=False, default_factory=list[tuple[float, int, Work]])

    def decide(self, work: Work, error: PenstockError, now: float) -> RetryDecision:
        """What follows a failed attempt. The work notes the failure, and whether it spent an attempt."""
        tries = Tries(request_id=work.request_id, ran=work.spent, put_back=work.put_backs + 1, deaths=work.deaths)
        decision = decide(error, tries, now, work.deadline, self.settings_of(work))
        if isinstance(decision, Requeue):
            work.put_backs += 1
        elif isinstance(decision, Retry):
            work.put_backs = 0
            work.spent += 1
        if isinstance(decision, Requeue | Retry):
            work.failure = error.message
        return decision

    def settings_of(self, work: Work) -> RetrySettings:
        """Those of its model, else of the worker, with the bound that its caller set."""
        spec = self._lanes[work.lane].spec
        return replace(spec.retries or self._settings, max_attempts=work.max_attempts or spec.max_attempts)

    def add(self, work: Work, at: float) -> None:
        """It waits until then."""
        heapq.heappush(self._queue, (at, work.seq, work))

    def tick(self, now: float) -> None:
        """Put back into the scheduler what is due. The scheduler names what is past its deadline then."""
        for _ in range(RETRIES_AT_ONCE):
            if not self._queue or self._queue[0][0] > now:
                return
            _, _, work = heapq.heappop(self._queue)
            if work.stage is Stage.RETRYING:
                self._put_back(work, now)

    def _put_back(self, work: Work, now: float) -> None:
        lane = self._lanes[work.lane]
        self._scheduler.put_back(work)
        if work.body is None:
            lane.parked[work.klass] += 1
        self._registry.transition(work, "due", Stage.QUEUED if work.body is not None else Stage.PARKED)
        self._statuses.say(work, "queued", now)
        self._dirty.look_at(lane)

    def next_due(self) -> float | None:
        return self._queue[0][0] if self._queue else None

    def waiting(self, model: str) -> list[Work]:
        """Requests for a model that wait for their next attempt."""
        return [work for _, _, work in self._queue if work.lane == model and work.stage is Stage.RETRYING]
