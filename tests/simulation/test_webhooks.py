"""Webhooks from one seed: every outcome reaches its receiver, whatever is killed. Planted defects are found."""

from __future__ import annotations

import time

import pytest

from simulation.webhooks.plants import PLANTS, planted
from simulation.webhooks.seeds import run

MOST_CPU_S = 6.0
PLANTED_SEEDS = 30


def test_every_outcome_reaches_its_receiver() -> None:
    calls = faults = seeds = 0
    began = time.process_time()
    while seeds < 10 or (seeds < 200 and time.process_time() - began < MOST_CPU_S):
        outcome = run(seeds)
        assert outcome.violation is None, (seeds, outcome.violation)
        calls, faults, seeds = calls + outcome.calls, faults + outcome.faults, seeds + 1
    assert calls > 100
    assert faults > 0


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found(name: str) -> None:
    _, promise, first = PLANTS[name]
    with planted(name):
        outcomes = (run(seed) for seed in range(first, first + PLANTED_SEEDS))
        found = next(one for one in outcomes if one.violation is not None)
    assert found.kind == promise


def test_a_seed_has_one_history() -> None:
    assert run(1).digest == run(1).digest
