"""Publishes the progress of runs as statuses: the first step at once, then a few a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.processors.core.effects import Status
from penstock.processors.core.requests.statuses import status_event
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Run, Work

EVERY_S = 0.2
"""No run publishes its progress more often than this."""


class Steps:
    """`emit` takes the statuses. Nothing is said of a run that has ended."""

    def __init__(self, emit: Callable[[Status], None]) -> None:
        self._emit = emit
        self._due: deque[tuple[float, Work, Run]] = deque()

    def done(self, work: Work, run: Run, step: int, steps: int, now: float) -> None:
        """A run has done a step of `steps`. A step that was reported before is no news."""
        if run.steps == steps and step <= run.step:
            return
        run.step, run.steps = step, steps
        if run.step_published_at is None or now - run.step_published_at >= EVERY_S:
            self._tell(work, run, now)
        elif not run.step_due:
            run.step_due = True
            self._due.append((run.step_published_at + EVERY_S, work, run))

    def tick(self, now: float) -> None:
        """Tell what has waited long enough."""
        due = self._due
        while due and due[0][0] <= now:
            _, work, run = due.popleft()
            if run.step_due and work.run is run and work.stage is Stage.RUNNING:
                self._tell(work, run, now)

    def next_due(self) -> float | None:
        return self._due[0][0] if self._due else None

    def _tell(self, work: Work, run: Run, now: float) -> None:
        run.step_published_at, run.step_due = now, False
        # A step says that it runs: `running` needs no status of its own any more.
        work.pending_status = work.published_status = "running"
        self._emit(status_event(work, "running", step=run.step, steps=run.steps))
