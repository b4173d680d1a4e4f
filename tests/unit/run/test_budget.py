"""Where the time of a run goes, and the time that each folder is allowed."""

from __future__ import annotations

import pytest

from kit.run.budget import Sample, Spent, Times, TimeTable, exceeded, format_budget, measured, parse_budget
from kit.run.pace import PaceMeter
from kit.run.results import Phase
from kit.run.sharing import SharedSetups
from support import wait_until


def test_rooms_are_added_up_the_longest_first() -> None:
    table = TimeTable()
    assert table.lines() == []
    for number in range(2):
        table.add(f"tests/integration/worker/test_a.py::test_{number}", "setup", 1.0)
        table.add(f"tests/integration/worker/test_a.py::test_{number}", "call", 2.0)
    table.add("tests/acceptance/test_01.py::test", "call", 9.5)
    table.add("tests/unit/cli/test_b.py::test", "call", 0.4)
    heading, first, second = table.lines()
    assert heading.split() == ["seconds", "setup", "call", "teardown", "tests", "folder"]
    assert first.split() == ["9.5", "0.0", "9.5", "0.0", "1", "tests/acceptance"]
    assert second.split() == ["6.0", "2.0", "4.0", "0.0", "2", "tests/integration/worker"]
    table.add("tests/acceptance/test_02.py::test", "call", 61.0)
    assert table.lines()[-1].split() == ["61.0", "tests/acceptance/test_02.py"]


GATEWAY, WORKER = "tests/integration/gateway", "tests/integration/worker"
RECORDED = Times(
    folders={GATEWAY: Spent(seconds=100.0, pace_ms=50.0), WORKER: Spent(seconds=900.0, pace_ms=50.0)},
    files={f"{GATEWAY}/test_a.py": 60.0, f"{GATEWAY}/test_b.py": 40.0},
)


def times(seconds: float, pace_ms: float = 50.0, folder: str = GATEWAY) -> Times:
    return Times(folders={folder: Spent(seconds=seconds, pace_ms=pace_ms)}, files={})


@pytest.mark.parametrize(
    ("now", "fails"),
    [
        pytest.param(times(133.0), False, id="below a third more"),
        pytest.param(times(134.0), True, id="above"),
        pytest.param(times(134.0, 52.0), False, id="a little more on a slower machine"),
        pytest.param(times(190.0, 50 / (1 - 0.47)), False, id="as slow as a machine that lost 47 %"),
        pytest.param(times(260.0, 50 / (1 - 0.47)), True, id="more than such a machine explains"),
        pytest.param(times(133.0, 25.0), False, id="a faster machine: tests that wait take as long"),
        pytest.param(times(134.0, 25.0), True, id="above on a faster machine"),
        pytest.param(times(10.0), False, id="less: a part of the folder was left out"),
        pytest.param(times(4.9, folder="tests/new"), False, id="a new folder that takes no time"),
        pytest.param(times(5.1, folder="tests/new"), True, id="a new folder"),
    ],
)
def test_a_folder_may_grow_by_a_third(now: Times, fails: bool) -> None:
    assert bool(exceeded(now, RECORDED)) is fails


def test_small_growth_of_a_small_folder_is_no_error() -> None:
    recorded = Times(folders={**RECORDED.folders, "tests/unit": Spent(seconds=1.0, pace_ms=50.0)}, files={})
    assert exceeded(times(5.9, folder="tests/unit"), recorded) == []
    assert exceeded(times(6.2, folder="tests/unit"), recorded) != []


def test_the_files_that_grew_are_named_the_most_first() -> None:
    files = {f"{GATEWAY}/test_a.py": 70.0, f"{GATEWAY}/test_b.py": 39.0, f"{GATEWAY}/test_c.py": 90.0}
    now = Times(folders={GATEWAY: Spent(seconds=199.0, pace_ms=55.0)}, files=files)
    assert exceeded(now, RECORDED) == [
        f"{GATEWAY} took 199 s; its budget is 100 s x 1.10 (slower machine)",
        f"    0.0 s -> 90.0 s  {GATEWAY}/test_c.py",
        f"    66.0 s -> 70.0 s  {GATEWAY}/test_a.py",
    ]


def test_each_folder_has_the_pace_of_its_own_minutes() -> None:
    """A wave of stolen time while one folder runs excuses that folder alone."""
    samples = [Sample(at=10.0 * number, work_ms=100.0 if 20 <= number < 40 else 50.0) for number in range(60)]
    phases = [
        Phase(nodeid=f"{WORKER}/test_a.py::test", when="call", outcome="passed", seconds=20.0, started=50.0),
        Phase(nodeid=f"{GATEWAY}/test_b.py::test", when="setup", outcome="passed", seconds=20.0, started=260.0),
        Phase(nodeid=f"{GATEWAY}/test_b.py::test", when="call", outcome="passed", seconds=60.0, started=300.0),
        Phase(nodeid=f"{GATEWAY}/test_c.py::test", when="call", outcome="passed", seconds=80.0, started=500.0),
    ]
    found = measured(phases, samples)
    assert found.folders[WORKER] == Spent(seconds=20.0, pace_ms=50.0)
    assert found.folders[GATEWAY] == Spent(seconds=160.0, pace_ms=75.0)
    assert found.files[f"{GATEWAY}/test_b.py"] == 80.0


def test_one_interrupted_sample_does_not_count() -> None:
    samples = [Sample(at=10.0 * number, work_ms=5000.0 if number == 3 else 50.0) for number in range(9)]
    phases = [Phase(nodeid=f"{WORKER}/test_a.py::test", when="call", outcome="passed", seconds=2.0, started=29.0)]
    assert measured(phases, samples).folders[WORKER].pace_ms == 50.0


def test_failed_tests_and_shared_setups_are_not_counted() -> None:
    name = f"{WORKER}/test_a.py::test_"
    phases = [
        Phase(nodeid=f"{name}1", when="setup", outcome="passed", seconds=30.0),
        Phase(nodeid=f"{name}1", when="call", outcome="failed", seconds=90.0),
        Phase(nodeid=f"{name}2", when="setup", outcome="passed", seconds=30.0, shared_seconds=25.0),
        Phase(nodeid=f"{name}2", when="call", outcome="passed", seconds=2.0),
    ]
    assert measured(phases, [Sample(at=0.0, work_ms=50.0)]).folders[WORKER].seconds == 7.0


def test_the_budget_is_read_as_it_was_written() -> None:
    assert parse_budget(format_budget(RECORDED)) == RECORDED


def test_the_pace_is_measured_from_the_start_to_the_end() -> None:
    with PaceMeter() as meter:
        wait_until(lambda: meter.samples, 60, "the first sample")
    assert len(meter.samples) >= 2
    assert all(sample.work_ms > 0 for sample in meter.samples)


def test_shared_setups_within_one_another_count_once() -> None:
    shared = SharedSetups()
    with shared.running(), shared.running():
        pass
    spent = shared.take()
    assert spent > 0
    assert shared.take() == 0
