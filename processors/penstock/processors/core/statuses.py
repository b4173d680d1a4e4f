"""Statuses that are not terminal: said only when they last, so that a quick request costs no event but its outcome."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.processors.core.effects import Status
from penstock.processors.core.work import Work


class Statuses:
    """`emit` takes the statuses that have lasted for the linger."""

    def __init__(self, emit: Callable[[Status], None], linger_s: float) -> None:
        self._emit = emit
        self._linger_s = linger_s
        self._due: deque[tuple[float, Work, str]] = deque()

    def say(self, work: Work, status: str, now: float) -> None:
        """The work is in this status from now on."""
        if work.pending_status != status:
            work.pending_status = status
            self._due.append((now + self._linger_s, work, status))

    def say_at_once(self, work: Work, status: str, detail: str | None = None) -> None:
        """Publish it without waiting whether it lasts."""
        work.pending_status = work.published_status = status
        self._emit(Status(work, status, work.attempt, work.epoch, detail))

    def moved_up(self, work: Work) -> None:
        """Its position has changed: said if it was told to be waiting at all."""
        if work.published_status == work.pending_status == "queued":
            self._emit(Status(work, "queued", work.attempt, work.epoch))

    def tick(self, now: float) -> None:
        """Publish what has lasted for the linger."""
        due = self._due
        while due and due[0][0] <= now:
            _, work, status = due.popleft()
            if work.pending_status == status and work.published_status != status and work.live:
                work.published_status = status
                self._emit(Status(work, status, work.attempt, work.epoch))

    def next_due(self) -> float | None:
        return self._due[0][0] if self._due else None
