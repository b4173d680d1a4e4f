"""The install that a hint names comes from where this installation came; `make install` compiles packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.installs import command_from, install_command

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
