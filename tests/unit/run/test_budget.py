"""The time that each folder is allowed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kit.run.budget import PaceMeter, Spent, Times, exceeded, read_budget, write_budget

GATEWAY, WORKER = "tests/integration/gateway", "tests/integration/worker"
RECORDED = Times(
    folders={GATEWAY: Spent(seconds=100.0, pace_ms=50.0), WORKER: Spent(seconds=900.0, pace_ms=50.0)},
    files={f"{GATEWAY}/test_a.py": 60.0, f"{GATEWAY}/test_b.py": 40.0},
)


@pytest.mark.parametrize(
    ("folder", "seconds", "pace_ms", "fails"),
    [
        pytest.param(GATEWAY, 133.0, 50.0, False, id="below a third more"),
        pytest.param(GATEWAY, 134.0, 50.0, True, id="above"),
        pytest.param(GATEWAY, 190.0, 50 / (1 - 0.47), False, id="as slow as a machine that lost 47 %"),
        pytest.param(GATEWAY, 260.0, 50 / (1 - 0.47), True, id="more than such a machine explains"),
        pytest.param(GATEWAY, 133.0, 25.0, False, id="a faster machine: tests that wait take as long"),
        pytest.param(GATEWAY, 134.0, 25.0, True, id="above on a faster machine"),
        pytest.param("tests/new", 4.9, 50.0, False, id="a new folder that takes no time"),
        pytest.param("tests/new", 5.1, 50.0, True, id="a new folder"),
        pytest.param("tests/unit", 5.9, 50.0, False, id="small growth of a small folder"),
        pytest.param("tests/unit", 6.2, 50.0, True, id="more than 1/200 of the run"),
    ],
)
def test_a_folder_may_grow_by_a_third(folder: str, seconds: float, pace_ms: float, fails: bool) -> None:
    recorded = Times(folders={**RECORDED.folders, "tests/unit": Spent(seconds=1.0, pace_ms=50.0)}, files={})
    now = Times(folders={folder: Spent(seconds=seconds, pace_ms=pace_ms)})
    assert bool(exceeded(now, recorded)) is fails


def test_the_files_that_grew_are_named_the_most_first() -> None:
    """A folder has the pace of its own minutes, each test weighted by its seconds."""
    now = Times()
    for name, seconds, pace_ms in (("a", 60.0, 50.0), ("a", 10.0, 50.0), ("b", 39.0, 50.0), ("c", 91.0, 61.0)):
        now.add(f"{GATEWAY}/test_{name}.py", seconds, pace_ms)
    assert exceeded(now, RECORDED) == [
        f"{GATEWAY} took 200 s; its budget is 100 s x 1.10 (slower machine)",
        f"    0.0 s -> 91.0 s  {GATEWAY}/test_c.py",
        f"    66.0 s -> 70.0 s  {GATEWAY}/test_a.py",
    ]


def test_the_budget_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_budget(tmp_path / "budget.toml", RECORDED)
    assert read_budget(tmp_path / "budget.toml") == RECORDED


def test_the_pace_is_measured_from_the_start() -> None:
    with closing(PaceMeter()) as pace:
        assert pace.ms > 0
