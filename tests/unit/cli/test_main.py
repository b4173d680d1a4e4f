"""The command line: light to import, helpful, one line and the right exit code for what a person can mend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import COMMANDS, app

runner = CliRunner()


def test_help_names_the_commands_and_shows_examples() -> None:
    done = runner.invoke(app, ["--help"])
    assert done.exit_code == 0
    for word in ("penstock up", "penstock chat", "topics", "doctor", "Exit codes"):
        assert word in done.output


@pytest.mark.parametrize(
    "name",
    ["up", "status", "down", "logs", "broker", "worker", "gateway", "bridge", "webhooks", "summarizer", "doctor"],
)
def test_each_command_has_help_with_an_example(name: str) -> None:
    done = runner.invoke(app, [name, "--help"])
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"penstock {name}" in done.output


def test_the_version_is_told() -> None:
    done = runner.invoke(app, ["--version"])
    assert (done.exit_code, done.output.split()[0]) == (0, "penstock")


def test_wrong_usage_is_2() -> None:
    assert runner.invoke(app, ["nothing-of-ours"]).exit_code == 2
    assert runner.invoke(app, ["status", "--nothing-of-ours"]).exit_code == 2


def test_a_failure_is_one_line_with_its_exit_code(tmp_path: Path) -> None:
    done = runner.invoke(app, ["status", "--data-dir", str(tmp_path)])
    assert done.exit_code == 3
    assert (
        done.stderr
        == f"penstock: Penstock is not running on {tmp_path}: start it with `penstock up --data-dir {tmp_path}`\n"
    )


def test_down_with_nothing_running_is_no_failure(tmp_path: Path) -> None:
    assert runner.invoke(app, ["down", "--data-dir", str(tmp_path)]).exit_code == 0


def test_a_named_config_that_is_missing_is_wrong_usage() -> None:
    done = runner.invoke(app, ["worker", "--config", "/nowhere/penstock.toml"])
    assert (done.exit_code, done.stderr) == (2, "penstock: no such configuration file: /nowhere/penstock.toml\n")


def test_importing_the_command_line_loads_no_heavy_room() -> None:
    code = (
        "import sys, penstock.cli.main;"
        "print([name for name in ('torch', 'transformers', 'faust', 'fastapi', 'httpx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_registered_module_that_is_there_can_be_loaded() -> None:
    for name in COMMANDS:
        assert runner.invoke(app, [name, "--help"]).exit_code in (0, 2)
