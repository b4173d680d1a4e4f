"""Tables on narrow terminals and in pipes."""

from __future__ import annotations

import pytest

from penstock.cli.commands.common import print_table

ID = "39cdcff9-2eaa-404c-822d-15fac21f1988"


@pytest.mark.parametrize("width", ["80", "200"])
def test_what_names_a_row_is_whole(
    width: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    print_table(
        ["artifact", "type", "created"], [[ID, "image/png", "2026-11-22T07:13:20.123Z " * 2], [None, "", ""]], "none"
    )
    assert ID in capsys.readouterr().out.split()
