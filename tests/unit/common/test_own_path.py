"""Processes that are told one path hold different ones, for as long as they live."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kit.refusals import refused
from penstock.common import file_lock, own_path
from penstock.common.own_path import claim_file, claim_folder


def test_each_takes_the_first_that_is_free(tmp_path: Path) -> None:
    base = tmp_path / "data" / "worker"
    first, second = claim_folder(base), claim_folder(base)
    assert (first.path, second.path) == (base, tmp_path / "data" / "worker-2")
    first.release()
    assert claim_folder(base).path == base


def test_a_file_is_numbered_before_its_suffix(tmp_path: Path) -> None:
    base = tmp_path / "gateway" / "view.sqlite"
    first, second = claim_file(base), claim_file(base)
    assert (first.path, second.path) == (base, base.with_name("view-2.sqlite"))
    first.release()
    assert claim_file(base).path == base, "the lock of the file itself, not of its folder"
    assert claim_file(base.with_name("other.sqlite")).path == base.with_name("other.sqlite")


def test_a_file_system_without_locks_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks = OSError(errno.ENOLCK, "no locks available")
    monkeypatch.setattr(file_lock.fcntl, "flock", Mock(side_effect=no_locks))
    assert [claim_folder(tmp_path / "worker").path for _ in range(2)] == [tmp_path / "worker"] * 2


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(OSError, "Not a directory", filename=str(tmp_path / "file" / "worker")):
        claim_folder(tmp_path / "file" / "worker")


def test_more_workers_than_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_path, "MOST", 2)
    held: list[Any] = [claim_folder(tmp_path / "worker") for _ in range(2)]
    with pytest.raises(OSError, match="2 processes hold"):
        claim_folder(tmp_path / "worker")
    for folder in held:
        folder.release()
