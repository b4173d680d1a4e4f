"""When a request will start and how long it will run, from what was measured of its model. Estimates, never promises.

Little's law the other way round: with `slots` at work and a mean service time of `s` seconds for a mean cost of `c`
tokens, a model works off `slots * c / s` tokens a second; who has `q` tokens before it starts in `q / rate`. Means are
exponentially weighted by observation (Roberts 1959). What came is held against what was said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

WEIGHT, LOAD_WEIGHT = 0.1, 0.5
"""Of the newest observation in a mean. Loads are few, and the newest says most: its replica stays for half of it."""


@dataclass(slots=True)
class Mean:
    """Exponentially weighted; the first observation begins it."""

    weight: float = WEIGHT
    value: float | None = None

    def add(self, observed: float) -> None:
        self.value = observed if self.value is None else self.value + self.weight * (observed - self.value)


@dataclass(slots=True)
class ModelTimes:
    """Of one model: seconds of a run, its cost in tokens, seconds of a load."""

    run_s: Mean = field(default_factory=Mean)
    cost: Mean = field(default_factory=Mean)
    load_s: Mean = field(default_factory=lambda: Mean(LOAD_WEIGHT))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """What is before a request. `cost`: tokens of those who start before it; `None` for those not counted.

    `busy` of `slots` work now. `loading_for_s`: since when its model loads, None when it is loaded, 0 when nobody has
    begun to load it.
    """

    requests: int
    slots: int
    busy: int
    cost: int | None = None
    loading_for_s: float | None = None


class Forecast:
    """`observe_error` takes (kind, seconds that came − seconds that were said); kind is start or run."""

    def __init__(self, observe_error: Callable[[str, float], None] | None = None) -> None:
        self._models = defaultdict[str, ModelTimes](ModelTimes)
        self._observe_error = observe_error

    def ran(self, model: str, seconds: float, cost: int) -> None:
        """A run of so much cost took so long."""
        times = self._models[model]
        if self._observe_error is not None and (said := self.run_s(model, cost)) is not None:
            self._observe_error("run", seconds - said)
        times.run_s.add(seconds)
        times.cost.add(cost)

    def loaded(self, model: str, seconds: float) -> None:
        """A load of the model took so long."""
        self._models[model].load_s.add(seconds)

    def started(self, said_at: float | None, now: float) -> None:
        """A request starts; `said_at` is the start time that its last status published, None if none did."""
        if said_at is not None and self._observe_error is not None:
            self._observe_error("start", now - said_at)

    def run_s(self, model: str, cost: int | None = None) -> float | None:
        """Seconds that a run takes, in proportion to its cost; None before the first run."""
        times = self._models.get(model)
        if times is None or times.run_s.value is None:
            return None
        mean_cost = times.cost.value
        if cost is None or not mean_cost:
            return times.run_s.value
        return times.run_s.value * cost / mean_cost

    def load_s(self, model: str) -> float | None:
        """Seconds that a load takes; None before the first."""
        times = self._models.get(model)
        return None if times is None else times.load_s.value

    def start_in_s(self, model: str, ahead: Ahead) -> float | None:
        """Seconds until a request starts; None while too little is known, or when a load takes longer than usual."""
        times = self._models.get(model) or ModelTimes()
        load_s = 0.0
        if ahead.loading_for_s is not None:
            if times.load_s.value is None or times.load_s.value < ahead.loading_for_s:
                return None
            load_s = times.load_s.value - ahead.loading_for_s
        slots = max(1, ahead.slots)
        must_end = ahead.requests + ahead.busy - slots + 1  # must end before it has a slot
        if must_end <= 0:
            return load_s
        mean_s = times.run_s.value
        if mean_s is None:
            return None
        requests = float(ahead.requests)
        if ahead.cost is not None and times.cost.value:
            requests = ahead.cost / times.cost.value
        in_line = requests + min(ahead.busy, slots) - slots + 1
        return load_s + mean_s * max(0.5, in_line) / slots
