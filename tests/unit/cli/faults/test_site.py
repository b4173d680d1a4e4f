"""Parts of a row's system that start together are stopped together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.faults.site import Supervised
from penstock.cli.readiness import Readiness
from penstock.cli.supervisor import Part


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_if_one_does_not_start_none_is_left(tmp_path: Path, error: type[BaseException]) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def launch() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "import signal; signal.pause()"]
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1]

    def look(pid: int) -> Readiness:
        raise error

    part = Part(name="part", launch=launch, log=tmp_path / "log", look=look, grace_s=1.0)
    with pytest.raises(error):
        Supervised().start(part)
    assert [process.poll() is None for process in started] == [False]
