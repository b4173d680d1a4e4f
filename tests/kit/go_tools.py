"""Programs and files of Go modules, made once into the user's cache by a Go that is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from penstock.cli.paths import cache_dir, exclusive
from stock_clients import missing, tool

BUILD_LIMIT_S = 570.0


def _go(*arguments: str, **env: str) -> str:
    done = subprocess.run(
        [tool("go"), *arguments],
        cwd=cache_dir(),
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        missing(f"go {' '.join(arguments)}: {done.stdout[-300:]}{done.stderr[-300:]}")
    return done.stdout


def go_program(package: str) -> Path:
    """The program that `go install` makes of a package with its version, as `example.com/module/cmd/name@v1.2.3`."""
    path, _, version = package.partition("@")
    folder = cache_dir() / "go-tools" / version
    program = folder / path.rpartition("/")[2]
    with exclusive(program.with_suffix(".lock")):
        if not program.exists():
            _go("install", package, GOBIN=str(folder))
    return program


def go_module(module: str) -> Path:
    """The folder with the files of a module in this version."""
    found: dict[str, Any] = json.loads(_go("mod", "download", "-json", module))
    return Path(found["Dir"])
