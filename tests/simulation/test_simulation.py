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
from simulation import runner
from simulation.livelock import bounded_cpu
from simulation.plants import NEEDS, PLANTS, planted
from simulation.runner import left_out, main, simulate
from simulation.seeds import run, shrink
from simulation.truth import Violation

QUICK_WITH_NEEDS = {
    "vanished_without_outcome": "vanished",
    "journal_blames_finished": "blame",
    "false_reason": "reason",
    "ended_without_look_up": "answer",
    "unkept_without_look_up": "answer",
    "suspect_stops_worker": "reason",
    "summary_added_nowhere": "summary",
    "fork_follows_its_parent": "fork",
    "newest_record_not_waited_for": "copy",
    "counts_behind_a_gone_head": "scan",
    "old_id_when_begun_again": "scan",
    "kept_without_reopen": "open",
    "checksum_ignored": "commit_before_outcome",
    "ends_what_others_serve": "rollout",
    "ends_what_others_could_load": "rollout",
    "copy_that_comes_back_is_a_duplicate": "commit_before_outcome",
}
"""Planted defects that take operators, or checks that are left out of other runs; and how they show."""
BEGIN_AT = {
    "gap_committed_past": 13,
    "attempt_used_twice": 20,
    "retry_polls_slot": 3,
    "batch_dies_with_poison": 4,
    "duplicate_not_held": 21,
    "cancel_unheard_retrying": 14,
    "continued_without_tokens": 4,
    "put_back_past_deadline": 241,
    "bytes_kept_beyond_share": 68,
    "grown_beyond_device": 61,
    "vanished_without_outcome": 20,
    "ended_without_look_up": 28,
    "unkept_without_look_up": 36,
    "suspect_stops_worker": 498,
    "summary_added_nowhere": 44,
    "fork_follows_its_parent": 1228,
    "newest_record_not_waited_for": 1,
    "counts_behind_a_gone_head": 331,
    "old_id_when_begun_again": 223,
    "kept_without_reopen": 117,
    "checksum_ignored": 116,
    "ends_what_others_serve": 13,
    "copy_that_comes_back_is_a_duplicate": 93,
    "starts_before_its_time": 3,
    "holds_back_its_partition": 56,
}
"""The first seed that is tried: one that finds the defect. Seeds before it cost time and find nothing, or show it in
another way. When plans are drawn differently it is another one: `make simulate PLANT=name` says which."""
TESTS = Path(__file__).parent.parent
SIMULATE_S = 15.0
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
    "cancel_unheard_retrying",
    "erasure_forgotten",
    "chunk_index_stands_still",
    "continued_without_tokens",
    "lost_ended_by_anybody",
    "put_back_past_deadline",
    "bytes_kept_beyond_share",
    "grown_beyond_device",
    "starts_before_its_time",
    "holds_back_its_partition",
)
"""Planted defects that show within a few seeds; `make simulate PLANT=name` tries all of them."""


def test_no_seed_breaks_an_invariant() -> None:
    report = simulate(range(1_000), most_s=SIMULATE_S)
    assert [(outcome.plan.seed, outcome.violation) for outcome in report.failed] == []
    assert report.steps > 1_000
    assert sum(report.faults.values()) > 0


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_defect_is_found_and_its_seed_repeats(name: str) -> None:
    first = BEGIN_AT.get(name, 0)
    report = simulate(range(first, first + 100), plant=name)
    assert report.failed, f"{name} was not found in {report.seeds} seeds"
    found = report.failed[0]
    with planted(name):
        again = run(found.plan)
    assert (again.digest, again.violation) == (found.digest, found.violation)
    assert run(found.plan).violation is None, "without the defect the seed is clean"


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
        smallest = shrink(outcome, 25)
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


def test_few_seeds_say_nothing_of_what_they_do_not_visit() -> None:
    report = simulate(range(2))
    assert report.missing
    assert json.loads(report.line())["unvisited"] == []
    report.seeds = runner.ALL_TRANSITIONS_FROM
    assert json.loads(report.line())["unvisited"] == [" ".join(one) for one in report.missing]


def test_a_transition_that_no_seed_visits_is_named_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status was 1 without any violation."""
    monkeypatch.setattr(runner, "ALL_TRANSITIONS_FROM", 1)
    assert main(["--seeds", "1", "--jobs", "1"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["unvisited"]
    assert "no seed visits" in told.err


@pytest.mark.parametrize(("world", "plant"), [("webhooks", "commits_what_was_read"), ("redrives", "never_marks")])
def test_other_worlds_are_run_by_name(world: str, plant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world", world, "--seeds", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == {"world": world, "seeds": 2, "violations": 0}
    assert main(["--world", world, "--seeds", "2", "--plant", plant]) == 1
    assert main(["--world", world, "--seeds", "2", "--plant", "grant_before_fit"]) == 2
    with pytest.raises(SystemExit):
        main(["--plant", plant])
