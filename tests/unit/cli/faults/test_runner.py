"""A row that the harness cannot run is red, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.failures import CliFailure
from penstock.cli.faults import disks, runner
from penstock.cli.faults.checker import BROKEN
from penstock.cli.faults.matrix import Plan
from penstock.cli.faults.runner import Run, run_row

SHARED: Any = None


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(folder=tmp_path / "histories", count=1_000, seed=1, commit="abc")


def test_a_disk_that_cannot_be_had_makes_its_row_red(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str) -> None:
        raise CliFailure("mount: only root can do that")

    monkeypatch.setattr(disks, "command", refused)
    row = run_row(Plan(row="disk", moment="queued"), run, SHARED, tmp_path)
    assert (row.verdict, row.proven) == (BROKEN, False)
    assert row.how == ["CliFailure: mount: only root can do that"]
    assert disks.why_no_disk() == "mount: only root can do that"
    assert [path.name for path in tmp_path.iterdir()] == ["histories"], "nothing else is left"


def test_a_system_that_does_not_start_makes_its_row_red(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_started(ground: Any, folder: Path, *rest: Any, **facts: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "worker.log").write_text("its last words")
        raise TimeoutError("the worker was not started again")

    monkeypatch.setattr(runner, "Site", not_started)
    plan = Plan(row="worker", moment="queued")
    row = run_row(plan, run, SHARED, tmp_path)
    assert (row.verdict, row.how) == (BROKEN, ["TimeoutError: the worker was not started again"])
    assert (run.logs_of(plan) / "worker.log").read_text() == "its last words"


def test_an_interrupt_is_no_row(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*rest: Any, **facts: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "Site", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_row(Plan(row="worker", moment="queued"), run, SHARED, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["histories"]
