"""What is measured of waits and runs, and what is said by it: times to live, estimates, reasons."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.core.queue.forecast import Ahead, Forecast
from penstock.processors.core.queue.lifetimes import ENOUGH, Lifetimes, LifetimeSettings
from penstock.processors.core.queue.quantiles import DecayingHistogram

# -- quantiles


@given(st.lists(st.floats(0.002, 80_000), min_size=1, max_size=300), st.floats(0.01, 0.99))
def test_a_quantile_is_exact_to_its_bucket(values: list[float], share: float) -> None:
    found = DecayingHistogram(half_life_s=1e9)
    for value in values:
        found.add(value, 0.0)
    ordered = sorted(values)
    exact = ordered[max(0, -(-round(share * len(ordered) * 1e9) // 10**9) - 1)]
    quantile = found.quantile(share)
    assert quantile is not None
    assert exact / 1.2 <= quantile <= max(exact * 1.2, ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1.2)


def test_what_is_long_ago_fades() -> None:
    found = DecayingHistogram(half_life_s=10.0)
    for _ in range(1_000):
        found.add(100.0, 0.0)
    for _ in range(100):
        found.add(1.0, 200.0)
    quantile = found.quantile(0.95)
    assert quantile is not None
    assert quantile < 1.3


def test_weights_stay_finite() -> None:
    found = DecayingHistogram(half_life_s=1.0)
    for now in range(0, 100_000, 50):
        found.add(1.0, float(now))
    assert found.quantile(0.5) == pytest.approx(1.0, rel=0.2)


# -- times to live


def measured(waits: list[float], **settings: float) -> Lifetimes:
    found = Lifetimes(LifetimeSettings(**settings))
    for wait in waits:
        found.waited("low", wait, 0.0)
    return found


def test_ttl_is_a_multiple_of_the_wait_of_its_class() -> None:
    found = measured([100.0] * ENOUGH, floor_s=60, factor=3)
    assert found.choose_ms("low") == pytest.approx(300_000, rel=0.2)
    assert found.choose_ms("high") is None


def test_ttl_has_a_floor_and_the_horizon_above_it() -> None:
    assert measured([0.01] * ENOUGH, floor_s=60).choose_ms("low") == 60_000
    assert measured([80_000.0] * ENOUGH).choose_ms("low") == 86_400_000


def test_nothing_is_chosen_while_little_is_known_or_without_settings() -> None:
    assert measured([1.0] * (ENOUGH - 1)).choose_ms("low") is None
    off = Lifetimes(None)
    for _ in range(100):
        off.waited("low", 1.0, 0.0)
    assert off.choose_ms("low") is None
    assert off.p95("low") is not None


# -- forecasts


def forecast(run_s: float = 2.0, cost: int = 100, load_s: float = 10.0) -> Forecast:
    found = Forecast()
    found.ran("m", run_s, cost)
    found.loaded("m", load_s)
    return found


def test_a_free_slot_is_no_wait() -> None:
    assert forecast().start_in_s("m", Ahead(requests=0, slots=4, busy=3)) == 0


def test_the_wait_is_what_stands_before_it_by_cost() -> None:
    long, short = Ahead(requests=8, slots=4, busy=4, cost=1_600), Ahead(requests=8, slots=4, busy=4, cost=400)
    assert forecast().start_in_s("m", long) == pytest.approx(2 * (16 + 1) / 4)
    assert forecast().start_in_s("m", short) == pytest.approx(2 * (4 + 1) / 4)


def test_loading_comes_before_all() -> None:
    assert forecast().start_in_s("m", Ahead(requests=0, slots=4, busy=0, loading_for_s=4.0)) == 6.0
    assert forecast().start_in_s("m", Ahead(requests=0, slots=4, busy=0, loading_for_s=40.0)) is None
    assert Forecast().start_in_s("m", Ahead(requests=0, slots=4, busy=0, loading_for_s=0.0)) is None


def test_nothing_is_said_of_a_model_that_never_ran() -> None:
    assert Forecast().start_in_s("m", Ahead(requests=9, slots=4, busy=4)) is None
    assert Forecast().run_s("m", 5) is None


def test_estimates_against_a_simulated_queue() -> None:
    """First come, first served on four slots: the estimate stays within a run's length of what came, in the mean."""
    chance, found, errors = random.Random(1), Forecast(), list[float]()
    free_at, ends = [0.0] * 4, list[float]()
    for number in range(2_000):
        cost = chance.randint(50, 150)
        now = number * 0.4  # arrivals at 2.5/s; four slots of 1 s would do 4/s, then 2.5 s runs overload them
        run_s = cost / 100 * (1.0 if number < 1_000 else 1.8)
        start = max(now, min(free_at))
        waiting = sum(end > now for end in ends[-200:])
        said = found.start_in_s("m", Ahead(requests=max(0, waiting - 4), slots=4, busy=min(4, waiting)))
        free_at[free_at.index(min(free_at))] = start + run_s
        ends.append(start + run_s)
        found.ran("m", run_s, cost)
        if said is not None and number > 100:
            errors.append(abs(said - (start - now)))
    assert sum(errors) / len(errors) < 1.0


def test_errors_are_told() -> None:
    errors: list[tuple[str, float]] = []
    found = Forecast(lambda kind, error: errors.append((kind, error)))
    found.ran("m", 2.0, 100)
    found.ran("m", 3.0, 100)
    found.started(None, 5.0)
    found.started(4.0, 5.0)
    assert errors == [("run", 1.0), ("start", 1.0)]
