"""The command line: light to import, with help for each command, without a running system, and as it was installed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from kit.cli import invoke
from penstock.cli.installs import command_from, install_command
from penstock.cli.main import COMMANDS

WITH_EXAMPLES = {
    "up", "status", "down", "logs", "broker", "worker", "gateway", "bridge", "webhooks", "summarizer", "doctor"
}  # fmt: skip


HELP = ["penstock up", "penstock chat", "topics", "doctor", "Exit codes"]
OF_COMMANDS = [
    ([name, "--help"], ["Example", f"penstock {name}"] if name in WITH_EXAMPLES else []) for name in COMMANDS
]


@pytest.mark.parametrize(("arguments", "words"), [(["--help"], HELP), (["--version"], ["penstock "]), *OF_COMMANDS])
def test_each_command_has_help(arguments: list[str], words: list[str]) -> None:
    done = invoke(*arguments)
    assert (done.exit_code, [word for word in words if word not in done.output]) == (0, [])


def test_without_a_running_system_status_fails_and_down_does_not(tmp_path: Path) -> None:
    folder = f"--data-dir {tmp_path}"
    done = invoke("status", *folder.split())
    said = f"penstock: Penstock is not running on {tmp_path}: start it with `penstock up {folder}`\n"
    assert (done.exit_code, done.stderr) == (3, said)
    assert invoke("down", *folder.split()).exit_code == 0


OF_WORKERS = ["torch", "transformers", "diffusers", "faust", "numpy", "PIL", "psutil"]
SLIM = ["cli.topics", "gateway.app", "gateway.bridge.app", "gateway.webhooks.app", "gateway.summarizer.app"]


@pytest.mark.parametrize(
    ("part", "packages"),
    [("cli.main", ["torch", "transformers", "faust", "fastapi", "httpx"]), *((part, OF_WORKERS) for part in SLIM)],
)
def test_the_command_line_and_the_slim_image_import_no_heavy_package(part: str, packages: list[str]) -> None:
    code = f"import sys, penstock.{part}; print([name for name in {packages} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


WHEEL = "file:///tmp/penstock-0.1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///srv/a%20b", "dir_info": {"editable": True}}, "pip install -e '/srv/a b[worker]'"),
        ({"url": "file:///srv/penstock", "dir_info": {}}, "pip install '/srv/penstock[worker]'"),
        ({"url": WHEEL, "archive_info": {}}, f"pip install 'penstock[worker] @ {WHEEL}'"),
        (None, "pip install 'penstock[worker]'"),
    ],
)
def test_the_command_follows_the_origin(origin: dict[str, Any] | None, command: str) -> None:
    assert command_from(origin, "worker") == command


def test_a_missing_extra_names_its_install_command() -> None:
    code = (
        "import sys; sys.modules['penstock.processors.app'] = None; sys.argv = ['penstock', 'worker'];"
        "from penstock.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(f": {install_command('worker')}\n")


def test_packages_are_compiled() -> None:
    """Nothing in a container may write beside them: each start of an engine would compile torch again."""
    if not any(Path(sys.prefix).glob(".installed-*")):
        pytest.skip("this environment was not made by make install")
    packages = Path(sysconfig.get_path("purelib"))
    for name in ("torch", "transformers", "diffusers", "faust", "fastapi"):
        compiled = packages / name / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc"
        assert compiled.exists(), f"{name} is not compiled"
