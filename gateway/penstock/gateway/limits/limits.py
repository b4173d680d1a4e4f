"""What a tenant, or one of its keys, may have: the limits as a value, and buckets of permits that refill. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

_RATES = ("requests_per_s", "calls_per_s", "cancels_per_s")
_NAMES = ("models", "pools")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one holder may have; None is without limit. A tenant's hold for all its keys together."""

    requests_per_s: float | None = None
    """Submissions, on average; one second's worth may come at once."""
    calls_per_s: float | None = None
    """HTTP requests and frames of sockets of any kind, likewise."""
    cancels_per_s: float | None = None
    """Requests whose end is asked for, likewise."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and answers, counted when a request ends."""
    outstanding: int | None = None
    """Requests accepted and not done."""
    sockets: int | None = None
    """Open WebSockets."""
    streams: int | None = None
    """Open HTTP exchanges that wait for an outcome: event streams, OpenAI calls, long polls."""
    conversations: int | None = None
    """Conversations that exist."""
    artifact_bytes: int | None = None
    """Bytes of all artifacts that are kept."""
    models: tuple[str, ...] | None = None
    """The only models that may be asked for, by id or alias."""
    pools: tuple[str, ...] | None = None
    """The only pools that may be asked for."""
    max_priority: int = 0
    """The most urgent priority; 0 is the most urgent of all."""
    max_vram_bytes: int | None = None
    """The largest `requirements.vram_bytes`."""
    max_cpu_memory_bytes: int | None = None
    """The largest `requirements.cpu_memory_bytes`."""

    def to_dict(self) -> dict[str, Any]:
        """The limits that are set."""
        limits: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                limits[item.name] = list(value) if isinstance(value, tuple) else value
        return limits

    def wider_than(self, other: Limits) -> set[str]:
        """The limits that leave more than those of `other`."""
        wider: set[str] = set()
        for item in fields(self):
            here, there = getattr(self, item.name), getattr(other, item.name)
            if item.name == "max_priority":
                more = here < there
            elif here is None or there is None:
                more = here is None and there is not None
            else:
                more = not set(here) <= set(there) if item.name in _NAMES else here > there
            if more:
                wider.add(item.name)
        return wider

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Limits:
        """Raises ValueError naming the limit that is unknown or impossible."""
        known: dict[str, Any] = {}
        names = [item.name for item in fields(cls)]
        for name, value in values.items():
            if value is None:
                continue
            if name not in names:
                raise ValueError(f"there is no limit {name!r}; limits are {', '.join(names)}")
            if name in _RATES:
                good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            elif name in _NAMES:
                good = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
                value = tuple(value) if good else value
            else:  # a count
                good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not good:
                raise ValueError(f"the limit {name} cannot be {value!r}")
            known[name] = value
        return cls(**known)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> Limits:
        """From `name=value` each; lists are separated by commas. Raises ValueError."""
        values: dict[str, Any] = {}
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals:
                raise ValueError(f"a limit is written as NAME=VALUE, not {text!r}")
            if name in _NAMES:
                values[name] = [one.strip() for one in value.split(",") if one.strip()]
            else:
                values[name] = _number(name, value)
        return cls.from_dict(values)

    def to_text(self) -> str:
        """The limits that are set, as `from_texts` reads them."""
        values = self.to_dict().items()
        return " ".join(f"{name}={','.join(value) if isinstance(value, list) else value}" for name, value in values)


def _number(name: str, text: str) -> float:
    try:
        return float(text) if name in _RATES else int(text)
    except ValueError:
        raise ValueError(f"the limit {name} cannot be {text!r}") from None


NO_LIMITS = Limits()


class TokenBucket:
    """Permits that refill at `rate` per second up to `burst`; time is passed in, in seconds.

    What costs more than a burst waits for a full bucket and leaves a debt, which is paid before the next.
    """

    __slots__ = ("_level", "_rate", "_updated_at", "burst")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self.burst = burst
        self._level = burst
        self._updated_at = now

    def take(self, now: float, cost: float = 1.0) -> float:
        """Take `cost` permits: 0.0, or how many seconds until it can be (nothing is taken then)."""
        wait_s = self.wait_s(now, cost)
        if wait_s == 0.0:
            self._level -= cost
        return wait_s

    def wait_s(self, now: float, cost: float = 1.0) -> float:
        """Seconds until `cost` permits could be taken."""
        self._refill(now)
        missing = min(cost, self.burst) - self._level
        return 0.0 if missing <= 0 else missing / self._rate

    def charge(self, now: float, cost: float) -> float:
        """Take what has been used already, into debt if need be; seconds until that is paid."""
        self._refill(now)
        self._level -= cost
        return max(0.0, -self._level / self._rate)

    def remaining(self, now: float) -> int:
        """Whole permits that are there."""
        self._refill(now)
        return max(0, math.floor(self._level))

    def used(self, now: float) -> float:
        """Permits that are taken; more than `burst` in debt."""
        self._refill(now)
        return self.burst - self._level

    def reset_s(self, now: float) -> float:
        """Seconds until the bucket is full."""
        self._refill(now)
        return max(0.0, (self.burst - self._level) / self._rate)

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._level >= self.burst

    def _refill(self, now: float) -> None:
        passed = max(0.0, now - self._updated_at)
        self._updated_at = max(self._updated_at, now)
        self._level = min(self.burst, self._level + passed * self._rate)


class Buckets:
    """One bucket for each (holder, rate), made when it is first asked for; a full one is the same as none."""

    def __init__(self, *, max_holders: int = 10_000) -> None:
        """A burst is one second's worth of the rate, at least one permit. The oldest buckets give way to new ones."""
        self._max_holders = max_holders
        self._buckets: dict[tuple[str, float], TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, holder: str, rate: float, now: float) -> TokenBucket:
        # The rate is part of the key, so that a changed limit takes effect at once.
        bucket = self._buckets.get((holder, rate))
        if bucket is None:
            if len(self._buckets) >= self._max_holders:
                self._buckets = {key: one for key, one in self._buckets.items() if not one.is_full(now)}
                for oldest in list(self._buckets)[: max(0, len(self._buckets) - self._max_holders * 3 // 4)]:
                    del self._buckets[oldest]
            bucket = self._buckets[(holder, rate)] = TokenBucket(rate, max(1.0, rate), now)
        return bucket


def duration_text(seconds: float) -> str:
    """A duration as OpenAI's headers tell it: `20ms`, `1.5s`, `6m0s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{int(seconds // 60)}m{math.ceil(seconds % 60)}s"
