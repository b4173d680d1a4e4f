"""The claim of a request that must run by itself: nobody else starts while it is held."""

from __future__ import annotations

from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.work.states import ON_LANE
from penstock.processors.core.work.work import Work

LONGEST_S = 60.0
"""So long others wait, at most, for one that must run alone; then they start for as long."""

LONGEST_UNPREPARED_S = 5.0
"""The same while it cannot start yet: an image of it may lie in a store that hangs."""


class AloneClaim:
    """One for the whole worker. Two workers died while its holder ran."""

    def __init__(self) -> None:
        self.holder: Work | None = None
        """It waits for all others to end, or runs by itself."""
        self.lane: Lane | None = None
        """The holder's."""
        self._since = float("-inf")
        self._none_before = float("-inf")

    def take(self, work: Work, lane: Lane, now: float) -> None:
        """From now on nobody else starts."""
        self.holder, self.lane, self._since = work, lane, now

    def give_up(self) -> None:
        self.holder = self.lane = None

    def is_due(self, work: Work, now: float, *, prepared: bool) -> bool:
        """Whether others may be kept waiting for it at this time. One that has held the claim for long loses it.

        It is prepared further then, beside them. `prepared`: whether it can start.
        """
        if work is self.holder and now - self._since >= (LONGEST_S if prepared else LONGEST_UNPREPARED_S):
            self._none_before = now + LONGEST_S
        return now >= self._none_before

    def excludes(self, work: Work) -> bool:
        """Whether another request holds it."""
        return self.holder is not None and self.holder is not work

    @property
    def is_running(self) -> bool:
        return self.holder is not None and self.holder.stage in ON_LANE
