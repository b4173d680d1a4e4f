"""A run's verdict: what is repeated, what a repeat excuses, and what the last page says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import pytest

from kit.run.contracts import Contract, Decision
from kit.run.page import command_for, contract_lines, last_page
from kit.run.results import Phase, RunResult, StageResult, repeat_files, wholly_passed

A, B = "tests/integration/test_a.py::test_one", "tests/integration/test_b.py::test_two"


def phase(nodeid: str, outcome: str = "failed", when: str = "call", **values: Any) -> Phase:
    return Phase(nodeid=nodeid, when=when, outcome=outcome, **values)


def stage(*phases: Phase, status: int = 1, repeatable: bool = True, name: str = "integration") -> StageResult:
    return StageResult(name=name, status=status, phases=phases, repeatable=repeatable)


def passed(*nodeids: str) -> StageResult:
    return stage(*(phase(nodeid, "passed") for nodeid in nodeids), status=0, repeatable=False)


def run(*failures: Phase, repeats: Sequence[StageResult] = (), **values: Any) -> RunResult:
    return RunResult(stages=[stage(*failures, **values)], repeats=repeats)


MANY = [f"tests/integration/test_{number}.py::test" for number in range(3)]
SETUPS = [phase(nodeid, when="setup", fixture="tests::kafka") for nodeid in MANY]
TEARDOWN = phase(A, when="teardown")
SKIPPED, BROKEN_END = stage(phase(A, "skipped", "setup"), status=0), stage(phase(A, "passed"), TEARDOWN)


@pytest.mark.parametrize(
    ("result", "red", "repeated", "twice", "once"),
    [
        pytest.param(RunResult(stages=[passed(A)]), False, 0, 0, 0, id="all passed"),
        pytest.param(run(phase(A), repeats=[passed(A)]), False, 1, 0, 0, id="passed the second time"),
        pytest.param(run(phase(A, when="???"), repeats=[passed(A)]), False, 1, 0, 0, id="its process had crashed"),
        pytest.param(run(phase(A), repeats=[stage(phase(A), repeatable=False)]), True, 0, 1, 0, id="failed twice"),
        pytest.param(run(phase(A)), True, 0, 0, 1, id="without a repeat"),
        pytest.param(run(phase(A), repeats=[stage(status=-11, repeatable=False)]), True, 0, 0, 1, id="repeat crashed"),
        pytest.param(run(phase(A), repeats=[SKIPPED]), True, 0, 0, 1, id="repeat skipped it"),
        pytest.param(run(phase(A), repeats=[BROKEN_END]), True, 0, 1, 0, id="teardown failed in the repeat"),
        pytest.param(run(TEARDOWN), True, 0, 0, 1, id="teardown alone is not repeated"),
        pytest.param(run(phase(A), TEARDOWN, repeats=[passed(A)]), False, 1, 0, 0, id="teardown after a failed call"),
        pytest.param(run(phase(A), repeatable=False), True, 0, 0, 1, id="unit tests are not repeated"),
        pytest.param(run(phase("tests/x.py", when="collect"), status=2), True, 0, 0, 1, id="not collected"),
        pytest.param(run(status=1), True, 0, 0, 0, id="failed without a report"),
        pytest.param(run(status=3), True, 0, 0, 0, id="internal error"),
        pytest.param(run(status=5), True, 0, 0, 0, id="no tests"),
        pytest.param(run(phase(A), repeats=[passed(A)], status=2), True, 1, 0, 0, id="interrupted after a failure"),
        pytest.param(run(phase(A), phase(B), repeats=[passed(A), passed(B)]), False, 2, 0, 0, id="two repeats"),
        pytest.param(run(*map(phase, MANY), repeats=[passed(*MANY)]), True, 3, 0, 0, id="three repeats"),
        pytest.param(run(*SETUPS, repeats=[passed(*MANY)]), False, 3, 0, 0, id="three tests of one fixture"),
    ],
)
def test_the_verdict(result: RunResult, red: bool, repeated: int, twice: int, once: int) -> None:
    found = [len(result.repeated()), len(result.failed_twice()), len(result.failed_once())]
    assert (result.red(), found) == (red, [repeated, twice, once])
    assert last_page(result)[-1] == ("the run FAILED" if red else "the run passed")


def test_tests_are_repeated_by_file_unless_many_files_failed() -> None:
    of_a = [f"{A}[1]", f"{A}[2]"]
    assert repeat_files(map(phase, [of_a[0], B, of_a[1]])) == [of_a, [B]]
    assert repeat_files(phase(f"tests/integration/test_{number}.py::test") for number in range(11)) == []


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([], False),
        ([phase(A, "passed", "setup")], False),
        ([phase(A, "passed", "setup"), phase(A, "passed")], True),
        ([phase(A, "passed"), phase(B, "skipped", "setup")], False),
        ([phase(A, "passed"), phase(B, "skipped")], False),
        ([phase(A, "passed"), phase(A, "failed", "teardown")], False),
    ],
)
def test_a_contract_has_passed_when_none_of_its_tests_was_left_out(phases: list[Phase], expected: bool) -> None:
    assert wholly_passed(phases) is expected


def test_where_what_is_missing_fails_a_skipped_test_is_left_out_on_purpose() -> None:
    skipped = [phase(A, "passed"), phase(B, "skipped", "setup")]
    assert wholly_passed(skipped, may_skip=True)
    assert not wholly_passed(skipped[1:], may_skip=True)
    assert not wholly_passed([*skipped, phase(B, "failed")], may_skip=True)


def test_the_last_page_names_failures_logs_and_commands() -> None:
    second = stage(phase(A, message="test_a.py:9: assert 3 == 4"), repeatable=False)
    failures = [phase(A, message="test_a.py:9: assert 1 == 2"), phase(B, message="gone", fixture="tests::system")]
    result = run(*failures, repeats=[second, passed(B)])
    assert last_page(result, other=["tests/unit took 9 s"]) == [
        "failed twice:",
        f"  {A}",
        "      test_a.py:9: assert 1 == 2",
        "      logs:  .test-logs/integration-test_a.py-test_one/",
        "      test_a.py:9: assert 3 == 4",
        "      logs:  .test-logs/integration-test_a.py-test_one.repeat/",
        f'      again: make test ARGS="{A}"',
        "repeated: failed once, then passed by itself:",
        f"  {B}",
        "      gone (fixture tests::system)",
        "      logs:  .test-logs/integration-test_b.py-test_two/",
        f'      again: make test ARGS="{B}"',
        "tests/unit took 9 s",
        "the run FAILED",
    ]
    assert last_page(RunResult(stages=[passed(A)]), other=["over budget"])[-1] == "the run FAILED"


def test_the_last_page_says_what_no_test_explains() -> None:
    assert "integration ended with exit status 5 (no test ran)" in last_page(run(status=5))
    repeated = run(*map(phase, MANY), repeats=[passed(*MANY)])
    assert "3 failures passed when repeated: at most 2 are allowed" in last_page(repeated)


@pytest.mark.parametrize("case", ["plain", "a b", "$HOME", "it's", 'q"q', "a;b", "*", "a`b`", "back\\slash"])
def test_the_command_runs_the_test_again_through_make_and_a_shell(case: str) -> None:
    nodeid = f"{A}[{case}]"
    make, target, argument = shlex.split(command_for(nodeid))
    assert (make, target) == ("make", "test")
    by_make = argument.removeprefix("ARGS=").replace("$$", "$")
    assert shlex.split(by_make) == [nodeid]


def test_contracts_say_why_they_run() -> None:
    contract = Contract(name="faust", tests=("tests/x",), covers=(), pins=())
    runs = Decision(contract=contract, runs=True, reason="a.py changed", digests={})
    rests = Decision(contract=contract, runs=False, reason="unchanged", digests={})
    first, second = contract_lines([runs, rests])
    assert first == "contract faust: runs (a.py changed)"
    assert second.startswith("contract faust: unchanged since its last successful run")
