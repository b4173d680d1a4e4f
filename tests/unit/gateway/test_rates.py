"""Rates by the records' own times: a minute's window, seconds that come out of order, replays of old records."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from penstock.gateway.limits.rates import WINDOW_S, Rate

NOW_MS = 1_700_000_000_500


def counted(times_ms: Iterable[int]) -> Rate:
    rate = Rate()
    for time_ms in times_ms:
        rate.count(time_ms)
    return rate


def test_nothing_yet() -> None:
    assert Rate().per_s(NOW_MS) == 0
    assert Rate().per_s(0) == 0


def test_the_mean_over_the_last_minute() -> None:
    rate = counted(NOW_MS - 1000 * ago for ago in range(WINDOW_S) for _ in range(3))
    assert rate.per_s(NOW_MS) == 3


@pytest.mark.parametrize(
    ("ago_s", "counts"), [(0, True), (WINDOW_S - 1, True), (WINDOW_S, False), (WINDOW_S + 1, False), (-1, False)]
)
def test_the_edges_of_the_window(ago_s: int, counts: bool) -> None:
    """Whole seconds: the one that runs and the 59 before it. What lies ahead of the clock is not counted yet."""
    assert counted([NOW_MS - 1000 * ago_s]).per_s(NOW_MS) == counts / WINDOW_S


def test_what_is_ahead_counts_when_its_time_has_come() -> None:
    rate = counted([NOW_MS + 5_000])
    assert rate.per_s(NOW_MS) == 0
    assert rate.per_s(NOW_MS + 5_000) == 1 / WINDOW_S


def test_it_fades_without_new_events() -> None:
    rate = counted([NOW_MS] * 60)
    assert rate.per_s(NOW_MS + 59_000) == 1
    assert rate.per_s(NOW_MS + 60_000) == 0


def test_a_replay_of_old_records_does_not_count() -> None:
    """Neither by itself, nor by taking the place of newer ones in the ring."""
    rate = counted([NOW_MS] * 6)
    for minutes in (1, 2, 600):
        rate.count(NOW_MS - 60_000 * minutes)
    assert rate.per_s(NOW_MS) == 6 / WINDOW_S
    assert counted([NOW_MS - 3_600_000] * 1_000).per_s(NOW_MS) == 0


def test_a_minute_later_the_same_place_counts_anew() -> None:
    rate = counted([NOW_MS] * 6)
    rate.count(NOW_MS + 60_000)
    assert rate.per_s(NOW_MS + 60_000) == 1 / WINDOW_S
    assert rate.per_s(NOW_MS) == 0


@pytest.mark.parametrize("seed", range(5))
def test_any_order_within_a_minute_counts_alike(seed: int) -> None:
    """Partitions are read side by side: their times come mixed."""
    chosen = random.Random(seed)
    times_ms = [NOW_MS - chosen.randrange(59_000) for _ in range(500)]
    chosen.shuffle(times_ms)
    assert counted(times_ms).per_s(NOW_MS) == pytest.approx(500 / WINDOW_S)
