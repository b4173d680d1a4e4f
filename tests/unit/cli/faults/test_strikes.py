"""How the fault table takes the store away, and gives it back."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.faults.strikes import exchange


def test_paths_change_places_and_back(tmp_path: Path) -> None:
    folder, file = tmp_path / "artifacts", tmp_path / "aside"
    folder.mkdir()
    (folder / "kept").write_text("x")
    file.touch()
    exchange(folder, file)
    assert folder.is_file()
    exchange(folder, file)
    assert (folder / "kept").read_text() == "x"


def test_without_the_other_path_it_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path, tmp_path / "missing" / "aside")
