"""Tables on narrow terminals and in pipes."""

from __future__ import annotations

import pytest
from rich.console import Console

from penstock.cli.commands import common

ID = "39cdcff9-2eaa-404c-822d-15fac21f1988"
HEAD = ["artifact", "type", "created"]
ROWS = [[ID, "image/png", "2026-11-22T07:13:20.123Z " * 20], [None, "", ""]]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_in_a_pipe_each_row_is_one_whole_line(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    common.print_table(HEAD, ROWS, "none")
    assert capsys.readouterr().out.splitlines()[1].split() == [ID, "image/png", *["2026-11-22T07:13:20.123Z"] * 20]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_on_a_terminal_nothing_is_cut_off(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "console", Console(force_terminal=True, no_color=True, width=width))
    common.print_table(["row", *(f"column{n}" for n in range(15))], [[ID, *([123] * 15)]], "none")
    out = capsys.readouterr().out
    assert ID in out
    assert "…" not in out
