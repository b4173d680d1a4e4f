"""Times to live that the worker chooses for requests that name no deadline, from recent waits of their class."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.processors.core.queue.quantiles import DecayingHistogram
from penstock.schemas.topics import CLASSES

ENOUGH = 20
"""With fewer waits of a class measured nothing is chosen."""
HALF_LIFE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeSettings:
    """`factor`: k of max(floor, k × p95). `longest_s`: the horizon bounds every time to live."""

    floor_s: float = 60.0
    factor: float = 3.0
    longest_s: float = 86_400.0


class Lifetimes:
    """Measures waits by class. Without settings it measures, and chooses nothing."""

    def __init__(self, settings: LifetimeSettings | None) -> None:
        self._settings = settings
        self._waits = {klass: DecayingHistogram(HALF_LIFE_S) for klass in CLASSES}

    def waited(self, klass: str, seconds: float, now: float) -> None:
        """A request of the class waited so long until it started or expired.

        Those that expire count too. If only those that start did, each expiry would shorten the next times to live.
        """
        self._waits[klass].add(max(0.0, seconds), now)

    def p95(self, klass: str) -> float | None:
        """Seconds that 95 % of the class waited less than; None before the first."""
        return self._waits[klass].quantile(0.95)

    def choose_ms(self, klass: str) -> int | None:
        """Milliseconds that a request may live from its append time on; None leaves it at the default."""
        settings, waits = self._settings, self._waits[klass]
        if settings is None or waits.observations < ENOUGH or (p95 := waits.quantile(0.95)) is None:
            return None
        return round(1000 * min(settings.longest_s, max(settings.floor_s, settings.factor * p95)))
