"""Tables on narrow terminals and in pipes."""

from __future__ import annotations

import re
from typing import Any

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


TABLES = [
    (["request", "task", "status", "priority", "model", "created"],
     [[ID, "text_generation", "completed", 5, "smollm2-135m", "2026-11-22T07:13:20.123Z"]]),
    (["worker", "state", "models", "queued", "running", "seen"],
     [["host-1", "running", "a (ready), b (absent), " * 9, "high:3 low:1", 2, "3 s ago"]]),
    (["id", "what"], [["2/17", "no-blanks-" * 30]]),
    (["a", "b", "c"], [[1, None, "short"]]),
    (["row", *(f"column{n}" for n in range(15))], [[ID, *([123] * 15)]]),
]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize(("columns", "rows"), TABLES)
def test_each_table_fits_the_terminal_and_loses_nothing(
    columns: list[str], rows: list[list[Any]], width: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(common, "console", Console(force_terminal=True, no_color=True, width=width))
    common.print_table(columns, rows, "none")
    out = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= width
    assert "…" not in out
    for cell in rows[0]:
        assert "".join(str(cell or "").split()) in "".join(out.split())


def test_a_row_that_does_not_fit_has_its_subject_on_a_line_of_its_own() -> None:
    columns, (row,) = TABLES[0]
    assert common.stacked(columns, [*map(str, row)], 80) == [
        ID,
        "  task text_generation  status completed  priority 5  model smollm2-135m",
        "  created 2026-11-22T07:13:20.123Z",
    ]
