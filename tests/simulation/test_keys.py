"""Idempotency-Keys from one seed: under each key one body is accepted. Planted defects are found."""

from __future__ import annotations

import pytest

from simulation.keys.plants import PLANTS, planted
from simulation.keys.seeds import run

SEEDS = 60
PLANTED_SEEDS = 20


def test_one_body_is_accepted_under_a_key() -> None:
    outcomes = [run(seed) for seed in range(SEEDS)]
    assert [(one.seed, one.violation) for one in outcomes if one.violation] == []
    assert sum(one.kills for one in outcomes) > 10
    answers = [answer for one in outcomes for _, _, answer in one.history]
    assert min(answers.count(code) for code in ("202", "422", "503")) > SEEDS / 2


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_defect_is_found_and_its_seed_repeats(name: str) -> None:
    with planted(name):
        outcomes = [run(seed) for seed in range(PLANTED_SEEDS)]
        found = next(one for one in outcomes if one.kind == PLANTS[name][1])
    again = run(found.seed)
    assert again.violation is None, "without the defect the seed is clean"
    assert run(found.seed).history == again.history
