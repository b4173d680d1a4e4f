"""The install that a hint names exists: it comes from where this installation came."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from penstock.cli.installs import command_from, install_command


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"url": "file:///srv/a%20b", "dir_info": {"editable": True}}, "pip install -e '/srv/a b[worker]'"),
        ({"url": "file:///srv/penstock", "dir_info": {}}, "pip install '/srv/penstock[worker]'"),
        (
            {"url": "file:///tmp/penstock-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'penstock[worker] @ file:///tmp/penstock-0.1.0-py3-none-any.whl'",
        ),
        (None, "pip install 'penstock[worker]'"),
    ],
)
def test_the_command_follows_the_origin(origin: dict[str, Any] | None, command: str) -> None:
    assert command_from(origin, "worker") == command


def test_a_room_that_is_missing_names_the_install_of_this_installation() -> None:
    code = (
        "import sys; sys.modules['penstock.processors.app'] = None; sys.argv = ['penstock', 'worker'];"
        "from penstock.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(f": {install_command('worker')}\n")
