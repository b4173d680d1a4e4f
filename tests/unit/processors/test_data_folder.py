"""Workers that are told one folder hold different ones, for as long as they live."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kit.refusals import refused
from penstock.common import file_lock
from penstock.processors import data_folder
from penstock.processors.data_folder import claim


def test_each_takes_the_first_that_is_free(tmp_path: Path) -> None:
    base = tmp_path / "data" / "worker"
    first, second = claim(base), claim(base)
    assert (first.path, second.path) == (base, tmp_path / "data" / "worker-2")
    first.release()
    assert claim(base).path == base


def test_a_file_system_without_locks_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks = OSError(errno.ENOLCK, "no locks available")
    monkeypatch.setattr(file_lock.fcntl, "flock", Mock(side_effect=no_locks))
    assert [claim(tmp_path / "worker").path for _ in range(2)] == [tmp_path / "worker"] * 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(OSError, "Not a directory", filename=str(tmp_path / "file" / "worker")):
        claim(tmp_path / "file" / "worker")


def test_more_workers_than_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_folder, "MOST", 2)
    held: list[Any] = [claim(tmp_path / "worker") for _ in range(2)]
    with pytest.raises(OSError, match="2 workers hold folders"):
        claim(tmp_path / "worker")
    for folder in held:
        folder.release()
