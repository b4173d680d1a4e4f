"""Durations counted in buckets that grow by a constant factor: quantiles with a known error. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil, log
from typing import TypeAlias

ERROR = 0.05
"""A quantile differs from the true one by at most this share, and by at most 1 ms below 10 ms."""
_GROWTH = (1 + ERROR) / (1 - ERROR)
LONGEST_MS = 48 * 3_600_000
"""What took longer counts as this."""
_PER_LOG = 1 / log(_GROWTH)
COUNT = ceil(log(LONGEST_MS) * _PER_LOG) + 1

Counts: TypeAlias = "array[int]"
"""How many fell into each bucket: 4 bytes a bucket. Bucket n ends at `_GROWTH ** n` ms."""


def counts_of(numbers: Iterable[int]) -> Counts:
    return array("I", numbers)


def no_counts() -> Counts:
    return array("I", bytes(4 * COUNT))


def bucket_of(duration_ms: int) -> int:
    """The bucket that a duration falls into."""
    return 0 if duration_ms <= 1 else min(COUNT - 1, ceil(log(duration_ms) * _PER_LOG))


def merged(many: Sequence[Counts]) -> Counts | None:
    """All of them together; None if there are none."""
    if len(many) < 2:
        return many[0] if many else None
    return array("I", map(sum, zip(*many, strict=True)))


def quantile(counts: Counts | None, share: float) -> int | None:
    """The duration in ms that this share did not exceed; None if nothing was counted."""
    if counts is None:
        return None
    up_to = list(accumulate(counts))
    if not up_to[-1]:
        return None
    number = bisect_left(up_to, max(1, ceil(share * up_to[-1])))
    return round(2 * _GROWTH**number / (_GROWTH + 1))
