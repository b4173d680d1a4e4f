"""What the next step looks at: the lanes on which something changed, and whether placement is asked."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.processors.core.fleet.lane import Lane

PLAN_EACH_S = 0.1
"""How often placement is asked while something waits and nothing has changed."""


class DirtySet:
    """Parts of the flow note here what their changes may affect. Times are seconds of the flow's clock."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        """Lanes to look at, in the order in which they changed."""
        self.plan_due = True
        self.now = float("-inf")
        """The time of the newest step or tick."""
        self._planned_at = float("-inf")

    def look_at(self, lane: Lane) -> None:
        """Something changed on the lane."""
        self.lanes[lane.name] = lane

    def look_at_all(self, lanes: Iterable[Lane]) -> None:
        """Something changed that may concern any lane, its prepared requests too."""
        for lane in lanes:
            lane.look_due = True
            self.lanes[lane.name] = lane

    def next_lane(self) -> Lane | None:
        """Take the lane that changed first."""
        if not self.lanes:
            return None
        return self.lanes.pop(next(iter(self.lanes)))

    def plan_soon(self) -> None:
        """Something changed that placement reads."""
        self.plan_due = True

    def plan_later(self, now: float) -> None:
        """Something waits. Placement is asked now and then, not each time that somebody looks."""
        if now - self._planned_at >= PLAN_EACH_S:
            self.plan_due = True

    def planning(self, now: float) -> None:
        """Placement is asked now."""
        self.plan_due, self._planned_at = False, now
