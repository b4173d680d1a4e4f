"""Rates by the records' own times: a minute's window, seconds that come out of order, replays of old records."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from penstock.gateway.limits.rates import WINDOW_S, Rate

NOW_MS = 1_700_000_000_500
MINUTE = 60_000


def counted(times_ms: Iterable[int]) -> Rate:
    rate = Rate()
    for time_ms in times_ms:
        rate.count(NOW_MS + time_ms)
    return rate


@pytest.mark.parametrize(
    ("times_ms", "at_ms", "in_window"),
    [
        ([], 0, 0),
        ([], -NOW_MS, 0),
        ([-1_000 * ago for ago in range(WINDOW_S) for _ in range(3)], 0, 3 * WINDOW_S),
        # Whole seconds: the current one and the 59 before it. A time ahead of the clock is not counted yet.
        ([0], 0, 1),
        ([-59_000], 0, 1),
        ([-MINUTE], 0, 0),
        ([-61_000], 0, 0),
        ([1_000], 0, 0),
        ([5_000], 5_000, 1),
        # It fades without new events.
        ([0] * 60, 59_000, 60),
        ([0] * 60, MINUTE, 0),
        # Old records do not count, and do not replace newer ones.
        ([0] * 6 + [-MINUTE, -2 * MINUTE, -600 * MINUTE], 0, 6),
        ([-60 * MINUTE] * 1_000, 0, 0),
        # A minute later the same place of the ring counts from zero.
        ([0] * 6 + [MINUTE], MINUTE, 1),
        ([0] * 6 + [MINUTE], 0, 0),
    ],
)
def test_records_in_the_window_count(times_ms: list[int], at_ms: int, in_window: int) -> None:
    assert counted(times_ms).per_s(NOW_MS + at_ms) == in_window / WINDOW_S


@pytest.mark.parametrize("seed", range(5))
def test_the_order_within_a_minute_does_not_matter(seed: int) -> None:
    """Partitions are read in parallel: their times are mixed."""
    chosen = random.Random(seed)
    times_ms = [-chosen.randrange(59_000) for _ in range(500)]
    assert counted(times_ms).per_s(NOW_MS) == pytest.approx(500 / WINDOW_S)
