"""The simulation itself: seeds without a violation, planted defects that are found, histories that repeat."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.processors.core.settings import FlowSettings
from simulation import plan as plans
from simulation.livelock import bounded_cpu
from simulation.plants import NEEDS, PLANTS, planted
from simulation.runner import left_out, main, simulate
from simulation.seeds import Outcome, run, shrink
from simulation.truth import Violation

QUICK_WITH_NEEDS = {
    "vanished_without_outcome": "vanished",
    "journal_blames_finished": "blame",
    "false_reason": "reason",
    "ended_without_look_up": "answer",
    "suspect_stops_worker": "reason",
    "kept_without_reopen": "open",
    "checksum_ignored": "commit_before_outcome",
}
"""Planted defects that take operators, or checks that are left out of other runs; and how they show."""
BEGIN_AT = {"suspect_stops_worker": 100, "checksum_ignored": 8}
"""The first seed that is tried, of defects that show late, or in another way before."""
TESTS = Path(__file__).parent.parent
SIMULATE_S = 20.0
QUICK = (
    "commit_before_outcome",
    "ack_past_a_hole",
    "done_map_copied",
    "gap_committed_past",
    "offsets_reset",
    "attempt_used_twice",
    "dropped_work_publishes",
    "line_never_released",
    "first_in_first_out_lane",
    "retry_polls_slot",
    "global_intake_cap",
    "grant_before_fit",
    "batch_dies_with_poison",
    "poison_forgotten",
    "duplicate_not_held",
    "leaked_grant",
    "grant_before_observing",
    "plans_for_ever",
)
"""Planted defects that show within a few seeds; `make simulate PLANT=name` tries all of them."""


def test_no_seed_breaks_an_invariant() -> None:
    report = simulate(range(1_000), most_s=SIMULATE_S)
    assert [(outcome.plan.seed, outcome.violation) for outcome in report.failed] == []
    assert report.steps > 1_000
    assert sum(report.faults.values()) > 0


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_defect_is_found_and_its_seed_repeats(name: str) -> None:
    report = simulate(range(100), plant=name)
    assert report.failed, f"{name} was not found in {report.seeds} seeds"
    first = report.failed[0]
    with planted(name):
        again = run(first.plan)
    assert (again.digest, again.violation) == (first.digest, first.violation)
    assert run(first.plan).violation is None, "without the defect the seed is clean"


def test_what_goes_round_at_one_instant_is_named() -> None:
    with planted("plans_for_ever"):
        outcome = run(plans.draw(0))
    assert outcome.kind == "livelock"
    assert "x placement" in (outcome.violation or "")


def test_a_seed_that_never_ends_is_ended_by_its_processor_time() -> None:
    def spin() -> None:
        with bounded_cpu(0.05):
            while True:
                pass

    with pytest.raises(Violation, match="livelock: the seed takes more than"):
        spin()
    with bounded_cpu(30.0):
        pass
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize("name", QUICK_WITH_NEEDS)
def test_a_plant_that_needs_operators_or_checks_is_found_with_them(name: str) -> None:
    first = BEGIN_AT.get(name, 0)
    report = simulate(range(first, first + 300), plant=name)
    assert [outcome.kind for outcome in report.failed] == [QUICK_WITH_NEEDS[name]]


def test_what_is_left_out_changes_nothing_else_of_a_plan() -> None:
    for seed in range(60):
        everything, nothing = plans.draw(seed, ()), plans.draw(seed, (*plans.OPERATORS, *plans.CHECKS))
        assert not nothing.operators
        assert not nothing.checks
        assert nothing.faults <= everything.faults
        assert nothing.kinds <= everything.kinds
        one = sorted(everything.operators)[:1]
        assert plans.draw(seed, one).operators == everything.operators.difference(one)


def test_what_is_known_to_be_open_is_left_out_and_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(plans.KNOWN_OPEN) <= {*plans.OPERATORS, *plans.CHECKS}
    for seed in range(60):
        assert plans.KNOWN_OPEN.keys().isdisjoint(plans.draw(seed).operators | plans.draw(seed).checks)
    assert "blame" not in left_out(None, including=["blame"])
    assert {"pin", "crash"} <= left_out(None, without=["pin", "crash"])
    assert NEEDS["false_reason"].isdisjoint(left_out("false_reason"))
    assert main(["--seed", "5", "--without", "pin", "--without", "crash"]) == 0
    assert "'crash'" not in capsys.readouterr().err


def test_what_an_order_forbids_at_the_end_says_so() -> None:
    """A class stays paused: the history ends with its requests waiting, and each says that it is paused."""
    plan = replace(
        plans.draw(0, (*plans.FAULTS, *plans.OPERATORS, *plans.KNOWN_OPEN)),
        operators=frozenset({"pause_class", "standing_orders"}),
        kinds=frozenset({"plain", "line"}),
        settings=FlowSettings(),
        requests=40,
        span_s=8.0,
        checks=frozenset({"reasons"}),
    )
    outcomes = (run(replace(plan, seed=seed)) for seed in range(60))
    rested = next(outcome for outcome in outcomes if outcome.left or outcome.violation)
    assert rested.violation is None
    with planted("false_paused"):
        again = run(rested.plan)
    assert again.kind == "reason"


def test_plants_leave_nothing_behind() -> None:
    clean = run(plans.draw(3)).digest
    for name in PLANTS:
        with planted(name):
            pass
    assert run(plans.draw(3)).digest == clean


def test_a_violation_is_made_smaller() -> None:
    with planted("grant_before_fit"):
        outcome = simulate(range(20), plant="grant_before_fit").failed[0]
        smallest = shrink(outcome, 60)
    assert smallest.kind == outcome.kind
    assert len(smallest.plan.faults) <= len(outcome.plan.faults)
    assert smallest.plan.requests < outcome.plan.requests


def test_histories_depend_on_nothing_but_the_seed() -> None:
    """Neither the order of sets of text nor addresses matter: other hash seeds give the same histories."""
    program = "from simulation import plan, seeds; print([seeds.run(plan.draw(s)).digest for s in range(6)])"
    histories: list[str] = []
    for hash_seed in ("1", "2"):
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        histories.append(done.stdout)
    assert histories[0] == histories[1]


def test_the_last_line_says_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--jobs", "1"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["seeds"] == 3
    assert told["violations"] == 0
    assert told["transitions_seen"] <= told["transitions"]
    assert main(["--seeds", "50", "--jobs", "1", "--plant", "grant_before_fit", "--shrink", "0"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["violations"] == 1


def test_a_seed_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "5"]) == 0
    first = capsys.readouterr().out
    assert main(["--seed", "5"]) == 0
    assert capsys.readouterr().out == first


def test_many_seeds_must_visit_every_transition() -> None:
    """A run of few seeds does not say so."""
    report = simulate(range(2))
    assert report.missing
    assert isinstance(report.failed, list)
    assert all(isinstance(outcome, Outcome) for outcome in report.failed)
