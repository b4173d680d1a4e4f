"""What a request is said to wait for, and when it starts: admission's refusal in the words of the records."""

from __future__ import annotations

from collections import Counter
from math import isinf

from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.queue.forecast import Ahead, Forecast
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.admission import Admission, Refusal
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.records import TIMELESS_REASONS, WaitingFor
from penstock.schemas.topics import CLASSES

NEAR_FRONT = 1_024
"""How many waiting requests are looked at for a report."""
UNKNOWN_START = TIMELESS_REASONS | {"conversation"}
"""What is before a turn may be of another model, and wait for anything."""


class Explainer:
    """Reads, changes nothing."""

    def __init__(self, scheduler: Scheduler[Work], lanes: Lanes, admission: Admission, forecast: Forecast) -> None:
        self._scheduler = scheduler
        self._lanes = lanes
        self._admission = admission
        self._forecast = forecast
        self._wall_ahead_ms = 0.0

    def clock(self, now: float, wall_ms: int) -> None:
        """The flow's clock is at `now`, the wall's at `wall_ms`."""
        self._wall_ahead_ms = wall_ms - now * 1000

    def wall_ms(self, now: float) -> int:
        """The wall's time in milliseconds since the epoch."""
        return round(now * 1000 + self._wall_ahead_ms)

    def explain(self, work: Work, now: float, ahead: tuple[int, int] | None = None) -> WaitingFor:
        """`ahead`: (requests, tokens) that start before it on its lane; None: all of its class and those above it,
        but no more than stood before it when it came or was last reported.
        """
        if work.stage is Stage.SCHEDULED:
            return WaitingFor(reason="scheduled", estimated_start_at=work.start_after_ms)
        refusal = self._admission.admit(work, now)
        reason = "class" if refusal is None else refusal.reason
        if reason == "class" and self._is_turn_of_other_tenant(work):
            reason = "tenant_share"
        starts_in_s = None
        if reason not in UNKNOWN_START and not self._first_waits_unknown(work, now):
            starts_in_s = self._starts_in_s(work, refusal, ahead or (self._before(work), None), now)
        return WaitingFor(
            reason=reason,
            position=work.position,
            need_bytes=None if refusal is None else refusal.need_bytes,
            free_bytes=None if refusal is None else self._admission.free_bytes(refusal),
            estimated_start_at=None if starts_in_s is None else self.wall_ms(now) + round(1000 * starts_in_s),
        )

    def detail(self, work: Work, waiting: WaitingFor) -> str | None:
        """What is paused, for one that waits for an order: its class or its model."""
        if waiting.reason != "paused":
            return None
        by_class = work.klass in self._scheduler.fronts.paused
        return f"the class {work.klass} is paused" if by_class else f"the model {work.lane} is paused"

    def _is_turn_of_other_tenant(self, work: Work) -> bool:
        """Whether of its class and model another tenant's request is next, and nothing more urgent."""
        scheduler = self._scheduler
        if scheduler.fronts.urgent_waits(work.lane, work.klass):
            return False
        return scheduler.fronts.next_tenant(work.lane, work.klass) not in (work.tenant, None)

    def _first_waits_unknown(self, work: Work, now: float) -> bool:
        """Whether the first that is before it waits for something of which nobody knows when it ends."""
        first = self._scheduler.fronts.first(work.lane)
        if first is None or first is work:
            return False
        refusal = self._admission.admit(first, now)
        return refusal is not None and refusal.reason in TIMELESS_REASONS

    def _before(self, work: Work) -> int:
        rank = CLASSES.index(work.klass)
        before = max(0, sum(self._scheduler.fronts.depth(work.lane, klass) for klass in CLASSES[: rank + 1]) - 1)
        return before if work.position is None else min(before, work.position)

    def _starts_in_s(
        self, work: Work, refusal: Refusal | None, ahead: tuple[int, int | None], now: float
    ) -> float | None:
        lane = self._lanes[work.lane]
        loading_for_s = None
        if not lane.ready:
            loading_for_s = now - lane.load_span[0] if lane.loading else 0.0
        slots, busy = sum(one.slots for one in lane.ready), sum(len(one.holders) for one in lane.ready)
        starts_in_s = self._forecast.start_in_s(
            work.lane, Ahead(requests=ahead[0], cost=ahead[1], slots=slots, busy=busy, loading_for_s=loading_for_s)
        )
        if starts_in_s is None or refusal is None or refusal.until is None:
            return starts_in_s
        return None if isinf(refusal.until) else max(starts_in_s, refusal.until - now)

    def reasons(self) -> dict[str, int]:
        """How many of those near the front wait for what, as was last published of them."""
        published = (work.published_waiting for work in self._scheduler.fronts.front(NEAR_FRONT))
        return dict(Counter(waiting[0] for waiting in published if waiting is not None))

    def to_clock(self, at_ms: int | None) -> float | None:
        """A time on the wall as one of the flow's clock."""
        return None if at_ms is None else (at_ms - self._wall_ahead_ms) / 1000
