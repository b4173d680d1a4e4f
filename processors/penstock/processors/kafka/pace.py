"""How fast records come, and for how long the first of them waits for others.

To wake the event loop costs about as much as a request does: what it runs is in no cache by then. So under load
records that are fetched gather for a moment and are handed over together. While few come, each is handed over at once.
"""

from __future__ import annotations

from math import exp

AVERAGE_S = 0.25
GATHER_S = 0.005
LOAD_PER_S = 250.0
"""Records a second from which on more than one comes within the time to gather, on average."""


class Pace:
    """A rate, averaged with exponential decay. Times are in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._per_s = 0.0
        self._at = float("-inf")

    def count(self, records: int, now: float) -> None:
        """So many came just now."""
        self._per_s = self.per_s(now) + records / AVERAGE_S
        self._at = now

    def per_s(self, now: float) -> float:
        """Records a second over the last moments."""
        return self._per_s * exp((self._at - now) / AVERAGE_S)

    def gather_s(self, now: float) -> float:
        """For how long a record that came now waits for others; 0 while few come."""
        return GATHER_S if self.per_s(now) >= LOAD_PER_S else 0.0
