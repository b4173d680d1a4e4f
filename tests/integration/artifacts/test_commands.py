"""`penstock artifacts` against the real routes over HTTP."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from artifact_gateway import ArtifactGateway
from penstock.cli.main import app
from penstock.common.artifacts import ArtifactStore

Run = Callable[..., Result]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


@pytest.fixture
def run(store: ArtifactStore, tmp_path: Path) -> Iterator[Run]:
    with ArtifactGateway(store, tmp_path) as serving:

        def do(*arguments: str, **options: Any) -> Result:
            where = ["--url", serving.url, "--key", serving.secrets["acme"]]
            return CliRunner().invoke(app, ["artifacts", *arguments, *where], **options)

        yield do


def test_up_down_and_away(run: Run, store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = os.urandom(700_000)
    picture = tmp_path / "cat.png"
    picture.write_bytes(data)
    put = run("put", str(picture), "--ttl", "3600")
    assert put.exit_code == 0, put.output
    made = put.stdout.strip()
    kept = store.describe("acme", made)
    assert (kept.media_type, kept.sha256) == ("image/png", hashlib.sha256(data).hexdigest())
    assert kept.expires_at_ms is not None
    listed = [json.loads(line) for line in run("list", "--json").stdout.splitlines()]
    assert [one["id"] for one in listed] == [made]
    assert made in run("list").stdout
    assert json.loads(run("show", made, "--json").stdout) == listed[0]
    assert kept.sha256 in run("show", made).stdout
    assert run("get", made).stdout.strip() == f"{made}.png"
    assert (tmp_path / f"{made}.png").read_bytes() == data
    assert run("get", made, "-o", "-").stdout_bytes == data
    assert run("delete", made, input="n\n").exit_code != 0
    assert run("delete", made, "--yes").exit_code == 0
    gone = run("get", made, "-o", str(tmp_path / "gone.png"))
    assert (gone.exit_code, (tmp_path / "gone.png").exists()) == (1, False)
    assert gone.stderr == f"penstock: there is no artifact {made} (not_found, artifact_id)\n"


def test_a_file_that_cannot_be_written_and_one_that_is_missing(run: Run, store: ArtifactStore, tmp_path: Path) -> None:
    kept = store.put("acme", b"x")
    refused = run("get", kept.artifact_id, "-o", str(tmp_path / "nowhere" / "x"))
    assert (refused.exit_code, "cannot be written" in refused.stderr) == (1, True)
    assert run("put", str(tmp_path / "missing.png")).exit_code == 2


@pytest.mark.parametrize("name", ["list", "show", "get", "put", "delete", "sweep"])
def test_each_command_teaches_by_an_example(name: str) -> None:
    shown = CliRunner().invoke(app, ["artifacts", name, "--help"])
    assert f"penstock artifacts {name}" in shown.output
