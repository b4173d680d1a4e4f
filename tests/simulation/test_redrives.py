"""Redrives from one seed: killed at any place and repeated, no letter runs twice. Planted defects are found."""

from __future__ import annotations

import pytest

from simulation.redrives.plants import PLANTS, planted
from simulation.redrives.seeds import run

SEEDS = 60
PLANTED_SEEDS = 10


def test_no_letter_runs_twice_and_none_is_forgotten() -> None:
    outcomes = [run(seed) for seed in range(SEEDS)]
    assert [(one.seed, one.violation) for one in outcomes if one.violation] == []
    assert sum(one.kills for one in outcomes) > 10
    assert sum(len(one.requests) for one in outcomes) > SEEDS


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found_and_its_seed_repeats(name: str) -> None:
    with planted(name):
        outcomes = [run(seed) for seed in range(PLANTED_SEEDS)]
        found = next(one for one in outcomes if one.kind == PLANTS[name][1])
    again = run(found.seed)
    assert again.violation is None, "without the defect the seed is clean"
    assert run(found.seed).requests == again.requests
