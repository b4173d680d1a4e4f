"""`make release` in a clone: what dist/ has, and `penstock up` by the wheel alone, outside of any checkout."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.paths import free_port
from stock_clients import missing
from support import wait_until

ROOT = Path(__file__).parents[3]
UV = [sys.executable, "-m", "uv"]
VERSION = "9.8.7"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / "deploy/release.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with this tree's files, of which a release was made."""
    clone = tmp_path_factory.mktemp("release") / "penstock"
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).stdout.split("\0")
    for name in filter(lambda name: (ROOT / name).is_file() and not name.startswith(("tests/", "docs/")), files):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_bytes((ROOT / name).read_bytes())
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## Unreleased", f"## {VERSION}", 1))
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "All")):
        identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        assert run("git", *identity, *words, cwd=clone).returncode == 0
    done = run(sys.executable, "deploy/release.py", VERSION, "--no-images", cwd=clone)
    if any(word in done.stderr for word in ("dns error", "tcp connect", "Connection refused")):
        missing("a package index")
    assert done.returncode == 0, done.stderr
    assert f"v{VERSION}" in done.stdout
    return clone


def test_dist_has_packages_their_bill_and_checksums(released: Path) -> None:
    dist = released / "dist"
    names = {one.name for one in dist.iterdir()}
    packages = {f"penstock-{VERSION}-py3-none-any.whl", f"penstock-{VERSION}.tar.gz"}
    rest = {f"penstock-{VERSION}-constraints.txt", f"penstock-{VERSION}.sbom.json", "SHA256SUMS"}
    assert names == packages | rest
    lines = (line.partition("  ") for line in (dist / "SHA256SUMS").read_text().splitlines())
    sums = {name: digest for digest, _, name in lines}
    assert sums == {name: hashlib.sha256((dist / name).read_bytes()).hexdigest() for name in names - {"SHA256SUMS"}}
    listed = json.loads((dist / f"penstock-{VERSION}.sbom.json").read_text())["components"]
    assert {"penstock": VERSION}.items() <= {one["name"]: one["version"] for one in listed}.items()
    changed = run("git", "status", "--porcelain", cwd=released).stdout.split()
    assert changed == ["M", "deploy/helm/penstock/Chart.yaml", "M", "pyproject.toml"]
    assert f'appVersion: "{VERSION}"' in (released / changed[1]).read_text()


def test_a_tree_with_changes_is_refused(released: Path) -> None:
    done = run(sys.executable, "deploy/release.py", VERSION, "--no-images", cwd=released)
    assert (done.returncode, "the tree has changes" in done.stderr) == (1, True), done.stderr


@pytest.fixture(scope="module")
def penstock(released: Path) -> Path:
    """The command of the wheel, in an environment of its own."""
    made = released.parent / "v"
    wheel, pins = next(released.glob("dist/*.whl")), released / f"dist/penstock-{VERSION}-constraints.txt"
    assert run(*UV, "venv", "--quiet", str(made), cwd=released.parent).returncode == 0
    install = (*UV, "pip", "install", "--quiet", "--python", str(made / "bin/python"), "-c", str(pins))
    done = run(*install, f"{wheel}[gateway,worker-remote,embedded]", cwd=released.parent)
    assert done.returncode == 0, done.stderr
    return made / "bin" / "penstock"


@pytest.fixture
def up(penstock: Path, tmp_path: Path) -> Iterator[str]:
    """`penstock up` with a model that is no engine's; the address of its gateway."""
    port, log = free_port(), tmp_path / "up.log"
    ports = ["--port", str(port), "--kafka-port", str(free_port()), "--data-dir", str(tmp_path / "data")]
    remote = ["--remote", f"http://127.0.0.1:{free_port()}/v1", "--model", "any"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(penstock), "up", *ports, *remote], cwd=tmp_path, stdout=out, stderr=out, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            try:
                return httpx.get(f"{url}/healthz", timeout=2).is_success
            except httpx.HTTPError:
                return False

        wait_until(answers, 180, log.read_text)
        yield url
    finally:
        process.terminate()
        process.wait(90)


def test_the_wheel_alone_serves_console_schemas_and_its_own_document(up: str, penstock: Path, tmp_path: Path) -> None:
    assert VERSION in run(str(penstock), "--version", cwd=tmp_path).stdout
    page = httpx.get(up, headers={"accept": "text/html"}, timeout=30)
    assert "text/html" in page.headers["content-type"]
    for path in ("/docs", "/openapi.json", "/registry/subjects", "/console/app.js"):
        assert httpx.get(up + path, timeout=30).is_success, path


@pytest.mark.parametrize(
    ("version", "changelog", "changes", "said"),
    [
        ("1.0", "## 1.0", "", "is no version"),
        ("1.0.0", "## 1.0.0", " M README.md\n", "the tree has changes"),
        ("1.0.0", "## Unreleased\n## 1.0.01", "", "CHANGELOG.md has no heading `## 1.0.0`"),
    ],
)
def test_what_cannot_be_released_is_refused(version: str, changelog: str, changes: str, said: str) -> None:
    release = script()
    with pytest.raises(release.Refused, match=said):
        release.check(version, changelog, changes)
    release.check("1.0.0", "## 1.0.0 (2026-12-01)", "")


def test_a_release_that_fails_leaves_the_files_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = script()
    for name in (*release.PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text() + f"\n## {VERSION}\n")
    before = {name: (tmp_path / name).read_text() for name in release.PLACES}

    def builds_nothing(*words: str) -> str:
        if words[0] != "git":
            raise subprocess.CalledProcessError(1, words)
        return ""

    for name, value in {"ROOT": tmp_path, "DIST": tmp_path / "dist", "run": builds_nothing}.items():
        monkeypatch.setattr(release, name, value)
    with pytest.raises(subprocess.CalledProcessError):
        release.release(VERSION, images=False)
    assert {name: (tmp_path / name).read_text() for name in release.PLACES} == before
