"""Programs and files of Go modules, made once into the user's cache by a Go that is installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.paths import cache_dir, exclusive
from stock_clients import missing, tool

BUILD_LIMIT_S = 570.0
MAY_BUILD = pytest.mark.timeout(2 * BUILD_LIMIT_S + 60)
"""For tests that use a program: the first one builds it, and on a busy machine that takes longer than a test may."""
GO = "go1.26.8"
"""The least that builds the programs. An older one fetches it as a module."""


def _run(go: str, *arguments: str, **env: str) -> str:
    done = subprocess.run(
        [go, *arguments],
        cwd=cache_dir(),
        env={**os.environ, "GOTOOLCHAIN": "local", **env},
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        missing(f"go {' '.join(arguments)}: {done.stdout[-300:]}{done.stderr[-300:]}")
    return done.stdout


def _downloaded(go: str, module: str) -> Path:
    found: dict[str, Any] = json.loads(_run(go, "mod", "download", "-json", module))
    return Path(found["Dir"])


@cache
def _go() -> str:
    installed = tool("go")
    version, system, machine = _run(installed, "env", "GOVERSION", "GOOS", "GOARCH").split()
    if _numbers(version) >= _numbers(GO):
        return installed
    folder = _downloaded(installed, f"golang.org/toolchain@v0.0.1-{GO}.{system}-{machine}")
    for program in [*folder.glob("bin/*"), *folder.glob("pkg/tool/*/*")]:
        program.chmod(0o755)  # a Go before 1.21 does not know that these are programs
    return str(folder / "bin" / "go")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def go_program(package: str) -> Path:
    """The program that `go install` makes of a package with its version, as `example.com/module/cmd/name@v1.2.3`."""
    path, _, version = package.partition("@")
    folder = cache_dir() / "go-tools" / version
    program = folder / re.sub(r"/v\d+$", "", path).rpartition("/")[2]
    with exclusive(program.with_suffix(".lock")):
        if not program.exists():
            _run(_go(), "install", package, GOBIN=str(folder))
    return program


def go_module(module: str) -> Path:
    """The folder with the files of a module in this version."""
    return _downloaded(_go(), module)
