"""What is booked comes close to what is measured, whatever the estimates were, and never forgets an out of memory."""

from __future__ import annotations

import json
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.processors.core.fleet.estimates import KEYS_KEPT, OOM_FORGOTTEN_AFTER, EstimateKey, Estimates

KEY = EstimateKey("m", "cuda", "float16")
MB = 1 << 20


class MadeUpEngine:
    """Memory affine in (sequences, tokens) plus noise; its estimates have each part wrong by up to half."""

    def __init__(self, seed: int, noise: float, parts: int) -> None:
        self.chance = random.Random(seed)
        self.noise = noise
        self.fixed = self.chance.uniform(200, 20_000) * MB
        self.slopes = [self.chance.uniform(1, 50) * MB, self.chance.uniform(0.02, 2) * MB][:parts]
        self.wrong = [self.chance.uniform(0.5, 1.5) for _ in range(parts + 1)]

    def shape(self) -> tuple[float, ...]:
        sequences = self.chance.randint(1, 64)
        return (float(sequences), float(sequences * self.chance.randint(16, 2048)))[: len(self.slopes)]

    def peak(self, shape: tuple[float, ...]) -> int:
        exact = self.fixed + sum(slope * part for slope, part in zip(self.slopes, shape, strict=True))
        return int(exact * self.chance.uniform(1 - self.noise, 1 + self.noise))

    def estimate(self, shape: tuple[float, ...]) -> int:
        parts = zip(self.slopes, shape, self.wrong[1:], strict=True)
        return int(self.fixed * self.wrong[0] + sum(slope * part * wrong for slope, part, wrong in parts))


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_after_50_requests_of_unseen_shapes_booked_is_close_to_measured(noise: float) -> None:
    """All but one in a thousand: 50 shapes may happen to lie close together, and the next one far from them."""
    ratios: list[float] = []
    for seed in range(200):
        engine, estimates = MadeUpEngine(seed, noise, 1 + seed % 2), Estimates()
        for _ in range(50):
            shape = engine.shape()
            estimates.learn(KEY, shape, engine.peak(shape), engine.estimate(shape))
        for _ in range(30):
            shape = engine.shape()
            ratios.append(estimates.need(KEY, shape, engine.estimate(shape)) / engine.peak(shape))
    ratios.sort()
    assert ratios[6] >= 1.0
    assert ratios[-7] <= 1.15
    assert ratios[0] >= 0.98


@given(seed=st.integers(0, 1 << 30), count=st.integers(0, 6))
def test_with_few_measurements_it_learns_from_the_worst_ratio(seed: int, count: int) -> None:
    engine, estimates = MadeUpEngine(seed, 0.0, 2), Estimates()
    shape = engine.shape()
    for _ in range(count):
        estimates.learn(KEY, shape, engine.peak(shape), engine.estimate(shape))
    booked = estimates.need(KEY, shape, engine.estimate(shape))
    assert booked >= (engine.peak(shape) if count else engine.estimate(shape))
    assert estimates.need(EstimateKey("m", "cpu", "float16"), shape, 1000) == 1200, "another device kind is another one"


@given(seed=st.integers(0, 1 << 30))
def test_an_out_of_memory_raises_what_as_large_ones_book_until_enough_have_run(seed: int) -> None:
    engine, estimates = MadeUpEngine(seed, 0.01, 2), Estimates()
    for _ in range(20):
        shape = engine.shape()
        estimates.learn(KEY, shape, engine.peak(shape), engine.estimate(shape))
    shape = (32.0, 32.0 * 512)
    booked = estimates.need(KEY, shape, engine.estimate(shape))
    raised = estimates.raise_after_oom(KEY, shape, booked)
    assert raised >= 1.25 * booked
    larger, smaller = (40.0, 40.0 * 512), (8.0, 8.0 * 64)
    before = Estimates.from_json(estimates.to_json())
    assert estimates.need(KEY, shape, engine.estimate(shape)) == raised
    assert estimates.need(KEY, larger, engine.estimate(larger)) >= raised
    assert estimates.need(KEY, smaller, engine.estimate(smaller)) == before.need(KEY, smaller, engine.estimate(smaller))
    for _ in range(OOM_FORGOTTEN_AFTER):
        estimates.learn(KEY, shape, engine.peak(shape), engine.estimate(shape))
    assert estimates.need(KEY, shape, engine.estimate(shape)) < raised


@given(seed=st.integers(0, 1 << 30), count=st.integers(0, 200))
def test_what_was_learned_is_bounded_and_survives_as_json(seed: int, count: int) -> None:
    engine, estimates = MadeUpEngine(seed, 0.02, 2), Estimates()
    for _ in range(count):
        shape = engine.shape()
        estimates.learn(KEY, shape, engine.peak(shape), engine.estimate(shape))
    estimates.raise_after_oom(KEY, (4.0, 400.0), 5 * MB)
    again = Estimates.from_json(json.loads(json.dumps(estimates.to_json())))
    shape = engine.shape()
    assert again.need(KEY, shape, engine.estimate(shape)) == estimates.need(KEY, shape, engine.estimate(shape))
    assert again.measured(KEY) == estimates.measured(KEY) <= 96


def test_what_cannot_be_read_counts_as_never_measured() -> None:
    for broken in ({}, {"version": 2}, {"version": 1, "learned": [{"model": "m"}, {"model": 1, "samples": 3}]}):
        assert Estimates.from_json(broken).need(KEY, (1.0,), 100) == 120


def test_a_lower_peak_brings_the_booking_down_slowly_and_a_higher_one_up_at_once() -> None:
    estimates = Estimates()
    estimates.learn(KEY, (8.0,), 1000 * MB, 1000 * MB)
    first = estimates.need(KEY, (8.0,), 1000 * MB)
    estimates.learn(KEY, (8.0,), 600 * MB, 1000 * MB)
    lower = estimates.need(KEY, (8.0,), 1000 * MB)
    assert 0.89 * first < lower < 0.91 * first
    for _ in range(20):
        estimates.learn(KEY, (8.0,), 600 * MB, 1000 * MB)
    assert estimates.need(KEY, (8.0,), 1000 * MB) < 1.15 * 600 * MB
    estimates.learn(KEY, (8.0,), 1100 * MB, 1000 * MB)
    assert estimates.need(KEY, (8.0,), 1000 * MB) >= 1100 * MB


def test_only_the_models_learned_of_last_are_remembered() -> None:
    estimates = Estimates()
    for number in range(KEYS_KEPT + 3):
        estimates.learn(EstimateKey(f"m{number}", "cpu", ""), (), 50, 100)
        estimates.learn(EstimateKey("m0", "cpu", ""), (), 50, 100)
    assert estimates.measured(EstimateKey("m0", "cpu", "")) == 1
    assert estimates.measured(EstimateKey("m1", "cpu", "")) == 0
    assert len(estimates.to_json()["learned"]) == KEYS_KEPT
