"""`penstock bench faults` around its rows: what it shows, what it keeps, and what it refuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from kit.cli import invoke
from penstock.cli.commands import fault_table
from penstock.cli.faults import runner, site
from penstock.cli.faults.checker import Row

HEAD = '{"what": "row", "at": 0, "row": "none", "moment": "mid_stream", "faults": false, "seed": 1, "commit": "abc"}'


def row_of(plan: Any, how: str, **facts: Any) -> Row:
    names: dict[str, Any] = dict.fromkeys(Row.__dataclass_fields__, 0)
    names |= {"row": plan.row, "moment": plan.moment, "control": plan.control, "expected": plan.expected}
    return Row(**{**names, "proven": True, "how": [how], "missing_evidence": [], "acknowledged": 1, **facts})


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""

    @contextmanager
    def no_broker(folder: Path) -> Generator[None]:
        folder.mkdir()
        yield

    monkeypatch.setattr(site, "broker", no_broker)
    monkeypatch.setattr(fault_table.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def run(*words: str) -> Result:
    return invoke("bench", "faults", *words)


@pytest.mark.parametrize("text", ["", HEAD[:40], HEAD])
def test_an_incomplete_history_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "row.jsonl"
    path.write_text(text)
    done = run("--check", str(tmp_path))
    assert done.exit_code == 2
    assert f"{path} is no whole history" in done.stderr


@pytest.mark.parametrize("lag", [7, 0], ids=["red", "good"])
def test_only_a_red_row_keeps_its_histories_and_says_why(kept: Path, monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    monkeypatch.setattr(runner, "run_row", lambda plan, *rest: row_of(plan, "it runs on", lag=lag))
    done = run("--rows", "worker:queued")
    assert done.exit_code == (1 if lag else 0)
    assert ("worker:queued is broken: it runs on" in done.stdout) == ("lag" in done.stdout) == bool(lag)
    assert "leaked_grants" not in done.stdout
    assert [f"histories and logs: {folder}" in done.stderr for folder in kept.iterdir()] == [True] * bool(lag)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_shows_the_rows_so_far(kept: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def run_row(plan: Any, *rest: Any) -> Row:
        if plan.moment == "queued":
            os.kill(os.getpid(), number)
        return row_of(plan, "it is gone")

    monkeypatch.setattr(runner, "run_row", run_row)
    done = run("--rows", "worker:accepted", "--rows", "worker:queued")
    assert done.exit_code == 130
    assert "accepted" in done.stdout
    assert "queued" not in done.stdout
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_plot_without_matplotlib_is_refused_before_the_run(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_table, "find_spec", lambda name: None)
    done = run("--rows", "worker:queued", "--plot", str(kept / "a.png"))
    assert done.exit_code == 2
    assert "penstock[bench]" in done.stderr


def test_without_git_the_version_stands_for_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert fault_table.current_commit() == fault_table.version("penstock")
