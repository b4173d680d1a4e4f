"""A run's verdict: what is repeated, what a repeat excuses, and what the last page says."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from kit.run.results import Results, Verdict, command_for, nodeids_to_repeat

A, B = "tests/integration/test_a.py::test_one", "tests/integration/test_b.py::test_two"
MANY = [f"tests/integration/test_{number}.py::test" for number in range(3)]


def stage(*reports: tuple[str, str, str], status: int | None = None) -> Results:
    """Of reports: a test, a phase and an outcome."""
    failed = any(outcome == "failed" for _, _, outcome in reports)
    result = Results(name="x", pace=SimpleNamespace(ms=50.0), status=status or int(failed))
    for nodeid, when, outcome in reports:
        report = pytest.TestReport(nodeid, ("", None, ""), {}, outcome, f"{when} {outcome}", when)
        result.pytest_runtest_logreport(report)
    return result


def failed(*nodeids: str, when: str = "call") -> list[tuple[str, str, str]]:
    return [(nodeid, when, "failed") for nodeid in nodeids]


def passed(*nodeids: str) -> Results:
    return stage(*((nodeid, "call", "passed") for nodeid in nodeids))


@pytest.mark.parametrize(
    ("first", "repeat", "red", "repeated", "lasting"),
    [
        pytest.param(stage(*failed(A)), stage(status=3), True, 0, 1, id="no second result"),
        pytest.param(stage(*failed(A)), stage((A, "setup", "skipped")), True, 0, 1, id="repeat skipped it"),
        pytest.param(
            stage(*failed(A)), stage((A, "call", "passed"), (A, "teardown", "failed")), True, 0, 1, id="repeat's end"
        ),
        pytest.param(stage(*failed(A, when="teardown")), passed(A), False, 1, 0, id="teardown"),
        pytest.param(stage(*failed(A, when="???")), passed(A), True, 0, 1, id="its process died"),
        pytest.param(stage(status=1), None, True, 0, 0, id="failed without a report"),
        pytest.param(stage(status=5), None, True, 0, 0, id="no tests"),
        pytest.param(stage(*failed(A), status=2), passed(A), True, 1, 0, id="interrupted after a failure"),
        pytest.param(stage(*failed(A, B)), passed(A, B), False, 2, 0, id="two repeats"),
        pytest.param(stage(*failed(*MANY)), passed(*MANY), True, 3, 0, id="three repeats"),
        pytest.param(stage(*failed(*MANY, when="setup")), passed(*MANY), False, 3, 0, id="three tests of one fixture"),
    ],
)
def test_the_verdict(first: Results, repeat: Results | None, red: bool, repeated: int, lasting: int) -> None:
    verdict = Verdict([first], repeat)
    assert (verdict.red, len(verdict.repeated), len(verdict.failed)) == (red, repeated, lasting)
    assert list(verdict.page())[-1] == ("the run FAILED" if red else "the run passed")


def test_nothing_is_repeated_if_many_files_failed() -> None:
    many = [f"tests/integration/test_{number}.py::test" for number in range(11)]
    assert nodeids_to_repeat([stage(*failed(*many[1:])), stage((A, "collect", "failed"))]) == many[1:]
    assert nodeids_to_repeat([stage(*failed(*many))]) == []


@pytest.mark.parametrize("case", ["plain", "a b", "$HOME", "it's", 'q"q', "a;b", "*", "a`b`", "back\\slash"])
def test_the_command_runs_the_test_again_through_make_and_a_shell(case: str) -> None:
    nodeid = f"{A}[{case}]"
    make, target, argument = shlex.split(command_for(nodeid))
    assert (make, target) == ("make", "test")
    assert shlex.split(argument.removeprefix("ARGS=").replace("$$", "$")) == [nodeid]
