"""A circuit breaker for a model whose loads or engines keep failing: closed, open, and half-open for one try.

After M. Nygard, "Release It!" (2007), with pauses that double.
"""

from __future__ import annotations

from enum import StrEnum

NEVER = float("inf")


class Circuit(StrEnum):
    """Closed: all is well. Open: nothing is tried. Half-open: one try shows whether it is well again."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens after `threshold` failures in a row, at once for what cannot be mended by trying. Times are seconds."""

    def __init__(self, *, threshold: int = 3, pause_s: float = 5.0, longest_pause_s: float = 300.0) -> None:
        self._threshold = threshold
        self._pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self._failures = 0
        self._opened = 0
        """How often in a row it was opened."""
        self._open_until: float | None = None
        self._trying = False

    def state(self, now: float) -> Circuit:
        if self._open_until is None:
            return Circuit.CLOSED
        return Circuit.OPEN if now < self._open_until else Circuit.HALF_OPEN

    @property
    def broken_until(self) -> float:
        """No load may begin before: for `ModelView`. For ever while the one try of a half-open circuit runs."""
        if self._trying:
            return NEVER
        return float("-inf") if self._open_until is None else self._open_until

    @property
    def failures(self) -> int:
        """In a row."""
        return self._failures

    def allows(self, now: float) -> bool:
        return now >= self.broken_until

    def tried(self, now: float) -> None:
        """A load begins. Of a half-open circuit it is the only one until its end is known."""
        self._trying = self.state(now) is Circuit.HALF_OPEN

    def succeeded(self) -> None:
        """A run has ended well, or a load where loads were what failed: all is forgotten."""
        self._failures, self._opened, self._open_until, self._trying = 0, 0, None, False

    def given_up(self) -> None:
        """The try ended without an answer (it was cancelled, or memory was short): another may begin."""
        self._trying = False

    def failed(self, now: float, *, hopeless: bool = False) -> None:
        """A load failed, or an engine died. `hopeless`: somebody has to mend it, trying again soon is of no use."""
        self._failures += 1
        half_open, self._trying = self._trying, False
        if not (hopeless or half_open or self._failures >= self._threshold):
            return
        pause_s = self._longest_pause_s if hopeless else self._pause_s * 2 ** min(self._opened, 16)
        self._opened += 1
        self._open_until = now + min(self._longest_pause_s, pause_s)

    def reset(self) -> None:
        """An operator ordered a load: it is tried at once."""
        self.succeeded()
