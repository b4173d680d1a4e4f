"""Events per second over the last minute. All times are of the clock by which rates are asked, and not ahead of it."""

from __future__ import annotations

from array import array

WINDOW_S = 60


class Rate:
    """A ring of counts by second."""

    __slots__ = ("_counts", "_seconds")

    def __init__(self) -> None:
        self._seconds, self._counts = array("q"), array("I")  # empty until something counts

    def count(self, time_ms: int) -> None:
        """One event at a time in ms since the epoch."""
        if not self._seconds:
            self._seconds, self._counts = array("q", [0] * WINDOW_S), array("I", [0] * WINDOW_S)
        second = time_ms // 1000
        at = second % WINDOW_S
        if self._seconds[at] == second:
            self._counts[at] += 1
        elif self._seconds[at] < second:
            self._seconds[at], self._counts[at] = second, 1

    def per_s(self, now_ms: int, window_s: int = WINDOW_S) -> float:
        """The mean over the last minute, or the last seconds of it; what lies outside of it is forgotten."""
        now = now_ms // 1000
        pairs = zip(self._seconds, self._counts, strict=True)
        return sum(count for second, count in pairs if now - window_s < second <= now) / window_s
