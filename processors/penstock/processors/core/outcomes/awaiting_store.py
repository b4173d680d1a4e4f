"""Finished requests whose output the store of artifacts did not take. It is asked again until their deadline."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.processors.core.effects import Effect, StoreOutput
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import Cancelled, Expired, PenstockError

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0
AT_ONCE = 64
"""How many are asked for in one tick."""


@dataclass(slots=True)
class _Tries:
    """Of one request: what is asked again, since when, and what was answered last."""

    keep: StoreOutput
    error: PenstockError
    until: float
    delay_s: float = FIRST_DELAY_S


@dataclass(eq=False)
class AwaitingStore:
    """Ordered by the time of the next try; delays double from FIRST_DELAY_S. No attempt is spent."""

    _registry: Registry
    _endings: Endings
    _statuses: Statuses
    _emit: Callable[[Effect], None]
    _least_s: float
    _queue: list[tuple[float, int, Work]] = field(init=False, default_factory=list[tuple[float, int, Work]])

    def not_stored(self, keep: StoreOutput, error: PenstockError, now: float, *, output_bytes: int) -> None:
        """The store did not take its output. `keep` is what is to be asked again.

        `output_bytes`: so much of the output is in memory meanwhile.
        """
        if (work := self._registry.in_stage(keep.subject, Stage.STORING)) is None:
            return
        tries: _Tries | None = work.awaiting_store
        if tries is None:
            latest = float("inf") if work.deadline is None else max(work.deadline, now + self._least_s)
            tries = work.awaiting_store = _Tries(keep, error, latest)
            self._statuses.say_at_once(work, "running", now, f"its output waits to be stored: {error}")
        else:
            tries.keep, tries.error, tries.delay_s = keep, error, min(2 * tries.delay_s, MAX_DELAY_S)
        self._registry.transition(work, "not_stored", Stage.AWAITING_STORE)
        self._registry.hold_output(work, output_bytes)
        heapq.heappush(self._queue, (min(now + tries.delay_s, tries.until), work.seq, work))
        if isinstance(work.end_with, Cancelled):
            self.cancel(work, work.end_with, now)

    def tick(self, now: float) -> None:
        """Ask again for what is due, and end what has waited until its deadline."""
        for _ in range(AT_ONCE):
            if not self._queue or self._queue[0][0] > now:
                return
            _, _, work = heapq.heappop(self._queue)
            tries: _Tries | None = work.awaiting_store
            if work.stage is not Stage.AWAITING_STORE or tries is None:
                continue
            if now >= tries.until:
                error = Expired(f"its output was not stored before its deadline: {tries.error}")
                self._endings.end_awaiting_store(work, "expire", tries.keep, error, now)
            else:
                self._registry.transition(work, "store", Stage.STORING)
                self._emit(tries.keep)

    def cancel(self, work: Work, error: Cancelled, now: float) -> None:
        """End one that waits, unless its answer is in its conversation already: that is its outcome.

        One that the store is being asked for ends when the store does not take it.
        """
        if work.stage is Stage.STORING:
            work.end_with = error
            return
        tries: _Tries | None = work.awaiting_store
        if tries is not None and (work.conversation_id is None or tries.keep.to is not None):
            self._endings.end_awaiting_store(work, "cancel", tries.keep, error, now)

    def next_due(self) -> float | None:
        return self._queue[0][0] if self._queue else None

    def waiting(self) -> int:
        return sum(work.stage is Stage.AWAITING_STORE for _, _, work in self._queue)
