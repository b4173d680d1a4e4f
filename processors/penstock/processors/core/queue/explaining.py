"""Why a waiting request waits and when it will start, from what the flow knows of its lane. Reads, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.core.queue.forecast import Ahead, Forecast
from penstock.processors.core.queue.scheduler import CLASSES, Scheduler
from penstock.processors.core.queue.waiting import WaitingFacts, waiting_for
from penstock.processors.core.requests.work import Work
from penstock.schemas.records import WaitingFor

NEAR_FRONT = 1_024
"""So many of those who wait are looked at for a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFacts:
    """The lane of a request at this moment, all its engines together. Bytes: what it or its model needs, what is free.

    `loading_since`: when the load that runs now began; None when none does.
    """

    ready: bool
    slots: int = 0
    busy: int = 0
    paused: bool = False
    """The model, or the class of the request."""
    memory_short: bool = False
    loading_since: float | None = None
    need_bytes: int | None = None
    free_bytes: int | None = None


class Explainer:
    """`lane_facts` is the flow's."""

    def __init__(
        self,
        scheduler: Scheduler[Work],
        forecast: Forecast,
        lane_facts: Callable[[Work], LaneFacts],
    ) -> None:
        self._scheduler = scheduler
        self._forecast = forecast
        self._lane_facts = lane_facts
        self._wall_ahead_ms = 0.0

    def clock(self, now: float, wall_ms: int) -> None:
        """The flow's clock stands at `now`, the wall's at `wall_ms`."""
        self._wall_ahead_ms = wall_ms - now * 1000

    def wall_ms(self, now: float) -> int:
        """The wall's time in milliseconds since the epoch."""
        return round(now * 1000 + self._wall_ahead_ms)

    def explain(self, work: Work, now: float, ahead: tuple[int, int] | None = None) -> WaitingFor:
        """`ahead`: (requests, tokens) that start before it on its lane; None: all of its class and those above it,
        but no more than stood before it when it came or was last told.
        """
        lane, scheduler = self._lane_facts(work), self._scheduler
        rank = CLASSES.index(work.klass)
        before = max(0, sum(scheduler.depth(work.lane, klass) for klass in CLASSES[: rank + 1]) - 1)
        if work.position is not None:
            before = min(before, work.position)
        above = scheduler.urgent_waits(work.lane, work.klass)
        turn_of_other = not above and scheduler.next_tenant(work.lane, work.klass) not in (work.tenant, None)
        facts = WaitingFacts(
            position=work.position,
            paused=lane.paused,
            line_is_held=not scheduler.eligible(work),
            memory_short=lane.memory_short,
            model_ready=lane.ready,
            held_by_slack=not above and rank == len(CLASSES) - 1 and scheduler.holds_back(work.lane),
            others_tenant_next=turn_of_other,
            need_bytes=lane.need_bytes,
            free_bytes=lane.free_bytes,
            starts_in_s=self._starts_in_s(work, lane, ahead or (before, None), now),
        )
        return waiting_for(facts, self.wall_ms(now))

    def _starts_in_s(self, work: Work, lane: LaneFacts, ahead: tuple[int, int | None], now: float) -> float | None:
        loading_for_s = None
        if not lane.ready:
            loading_for_s = 0.0 if lane.loading_since is None else now - lane.loading_since
        return self._forecast.start_in_s(
            work.lane,
            Ahead(requests=ahead[0], cost=ahead[1], slots=lane.slots, busy=lane.busy, loading_for_s=loading_for_s),
        )

    def reasons(self) -> dict[str, int]:
        """How many of those near the front wait for what, as they were last told."""
        told = (work.told_waiting for work in self._scheduler.front(NEAR_FRONT))
        return dict(Counter(waiting[0] for waiting in told if waiting is not None))

    def to_clock(self, at_ms: int | None) -> float | None:
        """A time on the wall as one of the flow's clock."""
        return None if at_ms is None else (at_ms - self._wall_ahead_ms) / 1000
