"""Statuses that are not terminal: said only when they last, so that a quick request costs no event but its outcome.

One of a waiting request says what it waits for. That is said again only of those near the front, and only when the
reason or the place has changed, so a long queue that moves costs no more events than a short one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice

from penstock.processors.core.effects import Status
from penstock.processors.core.requests.explaining import Explainer
from penstock.processors.core.requests.waits import Waits
from penstock.processors.core.work.work import Work
from penstock.schemas.records import WaitingFor

WAITING = frozenset({"queued", "waiting_for_memory", "loading_model"})
STATUS_OF = {"memory": "waiting_for_memory", "model_loading": "loading_model"}
"""Of one that waits for its model or for memory, by what it waits for as it is said."""


def status_event(
    work: Work,
    status: str,
    detail: str | None = None,
    *,
    done: bool = False,
    waiting: WaitingFor | None = None,
    step: int | None = None,
    steps: int | None = None,
) -> Status:
    """The effect that says how far a request is."""
    position = work.position if status == "queued" else None
    return Status(work.subject, status, detail, done, waiting, position, work.model_reason, work.ttl_ms, step, steps)


@dataclass(eq=False)
class Statuses:
    """`_emit` takes the statuses that have lasted for the linger."""

    _emit: Callable[[Status], None]
    _linger_s: float
    _explainer: Explainer
    _waits: Waits
    _due: deque[tuple[float, Work, str]] = field(init=False, default_factory=deque[tuple[float, Work, str]])
    _turns: dict[Work, None] = field(init=False, default_factory=dict[Work, None])
    """Turns of conversations that stated another reason than the turn before them, or did until they started."""

    def say(self, work: Work, status: str, now: float) -> None:
        if status == "running":
            self._waits.ran(work, now)
        if work.pending_status != status:
            work.pending_status = status
            self._due.append((now + self._linger_s, work, status))

    def say_at_once(self, work: Work, status: str, now: float, detail: str | None = None) -> None:
        """Publish it without waiting whether it lasts."""
        work.pending_status = work.published_status = status
        waiting = None
        if status in WAITING:
            waiting = self._explainer.explain(work, now)
            work.published_waiting = (waiting.reason, waiting.position)
            detail = detail or self._explainer.detail(work, waiting)
        self._emit(status_event(work, status, detail, waiting=waiting))

    def near_front(self, work: Work, now: float, ahead: tuple[int, int] | None) -> None:
        """It will start soon: what has changed is published, if it was published as waiting at all.

        `ahead`: (requests, tokens) that start before it on its lane, see `Explainer.explain`.
        """
        status = work.published_status
        if status not in WAITING or work.pending_status != status:
            return
        waiting = self._explainer.explain(work, now, ahead)
        if work.published_waiting != (waiting.reason, waiting.position) or _is_overdue(work, now):
            self._publish(work, status, now, ahead)

    def turns_behind(self, is_eligible: Callable[[Work], bool], count: int, now: float) -> None:
        """Turns that wait behind another one stand near no front: of some of them, what has changed is said too.

        Only those that stated another reason can be wrong. `count` of them are looked at, or an eighth of all.
        """
        for work in list(islice(self._turns, max(count, len(self._turns) // 8))):
            del self._turns[work]
            if not work.live or work.published_status not in WAITING or work.pending_status != work.published_status:
                continue
            self._turns[work] = None
            if not is_eligible(work):
                self.near_front(work, now, None)

    def tick(self, now: float) -> None:
        """Publish what has lasted for the linger."""
        due = self._due
        while due and due[0][0] <= now:
            _, work, status = due.popleft()
            if work.pending_status == status and work.published_status != status and work.live:
                self._publish(work, status, now)

    def _publish(self, work: Work, status: str, now: float, ahead: tuple[int, int] | None = None) -> None:
        waiting = detail = None
        if status in WAITING:
            waiting = self._explainer.explain(work, now, ahead)
            detail = self._explainer.detail(work, waiting)
            if status in STATUS_OF.values():  # it lasted for the linger: meanwhile it may wait for something else
                status = STATUS_OF.get(waiting.reason, "queued")
            work.pending_status = status
            published, waits = (work.published_status, work.published_waiting), (waiting.reason, waiting.position)
            if published == (status, waits):
                if not _is_overdue(work, now):
                    return
                waiting = replace(waiting, estimated_start_at=None)  # the estimate was wrong, and so would the next be
            work.published_waiting = waits
            self._turns.pop(work, None)
            if work.conversation is not None and waiting.reason != "conversation":
                self._turns[work] = None
            work.published_start_at = self._explainer.to_clock(waiting.estimated_start_at)
        work.published_status = status
        self._emit(status_event(work, status, detail, waiting=waiting))

    def next_due(self) -> float | None:
        return self._due[0][0] if self._due else None


def _is_overdue(work: Work, now: float) -> bool:
    return work.published_start_at is not None and work.published_start_at < now
