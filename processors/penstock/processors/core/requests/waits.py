"""Measured waits: what the estimate of a start and the choice of times to live learn from."""

from __future__ import annotations

from penstock.processors.core.queue.forecast import Forecast
from penstock.processors.core.queue.lifetimes import Lifetimes
from penstock.processors.core.requests.explaining import Explainer
from penstock.processors.core.work.work import Work


class Waits:
    """Each request is measured once: when it first runs, or when it expires."""

    def __init__(self, forecast: Forecast, explainer: Explainer, lifetimes: Lifetimes) -> None:
        self._forecast, self._explainer, self._lifetimes = forecast, explainer, lifetimes

    def ran(self, work: Work, now: float) -> None:
        """The work goes to its engine: its wait is held against the estimate."""
        if not work.counted_wait:
            self._forecast.started(work.published_start_at, now)
        self.measure(work, now)

    def measure(self, work: Work, now: float) -> None:
        """From when it could have started on: what waited in the log while no worker lived has waited too."""
        if not work.counted_wait:
            work.counted_wait = True
            waited_ms = self._explainer.wall_ms(now) - work.waits_from_ms
            self._lifetimes.waited(work.klass, waited_ms / 1000, now)
