"""The supervisor: backoff, restart with a visible line, ordered stop, nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.supervisor import Backoff, Part, Supervisor, command_part
from support import wait_until

STEADY = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('up', flush=True); time.sleep(60)"
)
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def part(tmp_path: Path, name: str, code: str, grace_s: float = 5) -> Part:
    log = tmp_path / f"{name}.log"
    return command_part(
        name,
        [sys.executable, "-c", code],
        log=log,
        ready=lambda: "up" in log.read_text(),
        grace_s=grace_s,
        env=dict(os.environ),
    )


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def test_backoff_doubles_to_its_limit_and_forgets_after_a_steady_life() -> None:
    backoff = Backoff(first_s=0.5, limit_s=4, steady_s=60)
    assert [backoff.ended(0.1) for _ in range(5)] == [0.5, 1, 2, 4, 4]
    assert backoff.ended(61) == 0.5


def test_a_part_that_dies_is_started_again_and_said(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    steady = part(tmp_path, "worker", STEADY)
    steady.backoff = Backoff(first_s=0.05)
    supervisor.start(steady)
    try:
        supervisor.wait_ready(steady, 20)
        assert steady.process is not None
        first = steady.process.pid
        os.kill(first, 9)

        def again() -> bool:
            supervisor.tend()
            return steady.running and steady.restarts == 1

        wait_until(again, 20, "the part runs again")
        assert steady.process.pid != first
        assert [line.split(";")[0] for line in lines] == [
            "the worker ended (signal 9)",
            "the worker is started again (restart 1)",
        ]
    finally:
        supervisor.kill()


def test_a_full_disk_ends_no_part_and_what_changed_is_told_when_it_has_room(tmp_path: Path) -> None:
    """A broker dies of a full disk: the file of what runs could not be written then, and all other parts ended too."""
    lines: list[str] = []
    told: list[int] = []
    full = False

    def changed() -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        told.append(broker.restarts)

    supervisor = Supervisor(lines.append, changed)
    broker, gateway = part(tmp_path, "broker", STEADY), part(tmp_path, "gateway", STEADY)
    broker.backoff = Backoff(first_s=0.01)
    try:
        for each in (broker, gateway):
            supervisor.start(each)
            supervisor.wait_ready(each, 20)
        assert broker.process is not None
        full = True
        broker.process.kill()
        broker.process.wait()

        def again() -> bool:
            supervisor.tend()
            return broker.running and broker.restarts == 1

        wait_until(again, 20, "the broker runs again")
        assert gateway.running
        assert lines[1:] == [
            "what runs cannot be written down (No space left on device): trying again",
            "the broker is started again (restart 1)",
        ]
        assert told[-1] == 0
        full = False
        supervisor.tend()
        assert told[-1] == 1
        count = len(told)
        supervisor.tend()
        assert len(told) == count
        full = True
        supervisor.stop()
        assert broker.process is gateway.process is None
    finally:
        supervisor.kill()


def test_a_part_that_the_disk_does_not_let_start_is_tried_again(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    broker = part(tmp_path, "broker", STEADY)
    broker.backoff = Backoff(first_s=0.01)
    launch, failures = broker.launch, [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def launch_at_last() -> subprocess.Popen[bytes]:
        if failures and broker.restarts:
            raise failures.pop()
        return launch()

    broker.launch = launch_at_last
    try:
        supervisor.start(broker)
        supervisor.wait_ready(broker, 20)
        assert broker.process is not None
        broker.process.kill()
        broker.process.wait()

        def again() -> bool:
            supervisor.tend()
            return broker.running

        wait_until(again, 20, "the broker runs again")
        assert broker.restarts == 2
        assert "the broker cannot start: [Errno 28] No space left on device" in lines[1]
    finally:
        supervisor.kill()


def test_parts_stop_in_reverse_order_and_stubborn_ones_are_killed(tmp_path: Path) -> None:
    lines: list[str] = []
    supervisor = Supervisor(lines.append)
    parts = [part(tmp_path, "broker", STEADY), part(tmp_path, "gateway", STUBBORN, grace_s=0.3)]
    for each in parts:
        supervisor.start(each)
    for each in parts:
        supervisor.wait_ready(each, 20)
    pids = [each.process.pid for each in parts if each.process is not None]
    supervisor.stop()
    assert lines == [
        "stopping the gateway",
        "the gateway did not stop within 0 s and was killed",
        "stopping the broker",
    ]
    assert not any(alive(pid) for pid in pids)


def test_grandchildren_end_with_their_part(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "print('up', child.pid, flush=True); time.sleep(60)"
    )
    supervisor = Supervisor(lambda line: None)
    family = part(tmp_path, "worker", code)
    supervisor.start(family)
    supervisor.wait_ready(family, 20)
    grandchild = int(family.log.read_text().split()[1])
    supervisor.stop()
    wait_until(lambda: not alive(grandchild), 10, f"process {grandchild} is gone")


def test_a_part_that_refuses_its_settings_is_not_tried_again(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda line: None)
    broken = part(tmp_path, "worker", "print('configuration: worker.inflight_cap: too small'); exit(2)")
    supervisor.start(broken)
    with pytest.raises(CliFailure, match="inflight_cap") as caught:
        supervisor.wait_ready(broken, 20)
    assert caught.value.exit_code is ExitCode.USAGE
    supervisor.kill()


def test_a_part_that_keeps_ending_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda line: None)
    broken = part(tmp_path, "gateway", "print('no such table'); exit(1)")
    broken.backoff = Backoff(first_s=0.01, limit_s=0.01)
    supervisor.start(broken)
    with pytest.raises(CliFailure, match="the gateway keeps ending while it starts: no such table"):
        supervisor.wait_ready(broken, 20)
    supervisor.kill()
