"""A quantile of recent observations, in constant memory: a histogram whose counts decay.

Buckets grow by a constant factor, so a quantile is exact to that factor (as in HdrHistogram and DDSketch). Old
observations fade by *forward decay* (Cormode, Shkapenyuk, Srivastava and Xu, ICDE 2009): new ones get a growing weight
and nothing old is touched; when weights become large all are scaled down once. P² (Jain and Chlamtac 1985) needs still
less memory, but assumes that the distribution does not change; that of waits does.
"""

from __future__ import annotations

from math import ceil, exp2, log2

PER_OCTAVE = 4
"""Buckets for each doubling: a quantile is at most 19 % too high."""
LEAST = 0.001
OCTAVES = 27
"""Up to 134,000 times 1 s: more than a day."""
LARGE = 64
"""Half-lives after which weights are scaled down."""


class DecayingHistogram:
    """Of positive numbers, seconds as a rule. What was observed `half_life_s` ago counts half."""

    __slots__ = ("_counts", "_half_life_s", "_landmark", "_total", "observations")

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._counts = [0.0] * (PER_OCTAVE * OCTAVES + 1)
        self._total = 0.0
        self._landmark: float | None = None
        self.observations = 0
        """Since the beginning, not decayed."""

    def add(self, value: float, now: float) -> None:
        if self._landmark is None:
            self._landmark = now
        age = max(0.0, now - self._landmark) / self._half_life_s
        if age > LARGE:
            scale = exp2(-age)
            self._counts = [count * scale for count in self._counts]
            self._total = sum(self._counts)
            self._landmark, age = now, 0.0
        weight = exp2(age)
        self._counts[_bucket(value)] += weight
        self._total += weight
        self.observations += 1

    def quantile(self, share: float) -> float | None:
        """The least bound below which at least `share` of the weight lies; None before the first observation."""
        if not self._total:
            return None
        wanted, seen = share * self._total, 0.0
        for number, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted * (1 - 1e-12):
                return _upper(number)
        return _upper(len(self._counts) - 1)


def _bucket(value: float) -> int:
    if value <= LEAST:
        return 0
    return min(PER_OCTAVE * OCTAVES, ceil(PER_OCTAVE * log2(value / LEAST) - 1e-9))


def _upper(bucket: int) -> float:
    return LEAST * exp2(bucket / PER_OCTAVE)
