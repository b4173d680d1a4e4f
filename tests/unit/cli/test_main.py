"""The command line: light to import, with help for each command, and without a running system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.cli import invoke
from penstock.cli.main import COMMANDS

WITH_EXAMPLES = {
    "up", "status", "down", "logs", "broker", "worker", "gateway", "bridge", "webhooks", "summarizer", "doctor"
}  # fmt: skip


def test_help_names_the_commands_and_shows_examples() -> None:
    done = invoke("--help")
    assert done.exit_code == 0
    assert all(word in done.output for word in ("penstock up", "penstock chat", "topics", "doctor", "Exit codes"))


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help(name: str) -> None:
    done = invoke(name, "--help")
    assert done.exit_code == 0
    if name in WITH_EXAMPLES:
        assert "Example" in done.output
        assert f"penstock {name}" in done.output


def test_version() -> None:
    done = invoke("--version")
    assert (done.exit_code, done.output.split()[0]) == (0, "penstock")


def test_without_a_running_system_status_fails_and_down_does_not(tmp_path: Path) -> None:
    folder = f"--data-dir {tmp_path}"
    done = invoke("status", *folder.split())
    said = f"penstock: Penstock is not running on {tmp_path}: start it with `penstock up {folder}`\n"
    assert (done.exit_code, done.stderr) == (3, said)
    assert invoke("down", *folder.split()).exit_code == 0


def test_importing_the_command_line_loads_no_heavy_package() -> None:
    code = (
        "import sys, penstock.cli.main;"
        "print([name for name in ('torch', 'transformers', 'faust', 'fastapi', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
