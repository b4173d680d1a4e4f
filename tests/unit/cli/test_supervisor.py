"""The supervisor: backoff, restart with a visible line, ordered stop, nothing left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.refusals import refused
from penstock.cli import children, supervisor
from penstock.cli.children import tail
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.readiness import Readiness
from penstock.cli.supervisor import Backoff, Part, Supervisor, command_part
from support import alive, wait_until

STEADY = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print('up', flush=True); time.sleep(60)"
)
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class World:
    """A supervisor, its output, and parts that are Python programs. `full`: the state cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines, self.written, self.full = folder, list[str](), 0, False
        self.supervisor = Supervisor(self.lines.append, self.changed)

    def changed(self) -> None:
        if self.full:
            raise NO_SPACE
        self.written += 1

    def part(self, name: str, code: str = STEADY, grace_s: float = 5, *, ready: bool = True) -> Part:
        """A part that was started and is ready."""
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-c", code]

        def look(pid: int) -> Readiness:
            return Readiness(status="ready" if "up" in log.read_text() else "starting")

        made = command_part(name, command, log=log, look=look, grace_s=grace_s, env=lambda: os.environ)
        made.backoff = Backoff(first_s=0.05, limit_s=0.05)
        self.supervisor.start(made)
        if ready:
            self.supervisor.wait_ready(made, 20)
        return made

    def kill(self, part: Part, restarts: int = 1) -> None:
        """Kills a part and tends it until it runs again."""
        assert part.process is not None
        part.process.kill()
        part.process.wait()

        def again() -> bool:
            self.supervisor.tend()
            return part.running and part.restarts == restarts

        wait_until(again, 20, f"the {part.name} runs again")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.supervisor.kill()


def test_backoff_doubles_to_its_limit_and_is_reset_after_a_steady_run() -> None:
    backoff = Backoff(first_s=0.5, limit_s=4, steady_s=60)
    assert [backoff.ended(0.1) for _ in range(5)] == [0.5, 1, 2, 4, 4]
    assert backoff.ended(61) == 0.5


def test_a_full_disk_ends_no_part_and_the_state_is_written_once_there_is_room(world: World) -> None:
    broker, gateway = world.part("broker"), world.part("gateway")
    world.full, written = True, world.written
    world.kill(broker)
    assert gateway.running
    assert world.lines[0].startswith("the broker ended (signal 9);")
    assert world.lines[1:] == [
        "what runs cannot be written down (No space left on device): trying again",
        "the broker is started again (restart 1)",
    ]
    world.full = False
    for _ in range(2):
        world.supervisor.tend()
        assert world.written == written + 1
    world.full = True
    world.supervisor.stop()
    assert broker.process is gateway.process is None


def test_a_log_that_grows_is_cut_while_its_part_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    appends = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01); print('more', flush=True)"
    monkeypatch.setattr(supervisor, "LOGS_S", 0.0)
    part = world.part("gateway", appends)
    wait_until(lambda: "more" in part.log.read_text(), 20)
    monkeypatch.setattr(children, "LOG_LIMIT_BYTES", 6)
    world.supervisor.tend()
    assert (world.folder / "gateway.log.1").read_text().startswith("up\nmore\n")
    wait_until(lambda: part.log.read_bytes().startswith(b"more\n"), 20)
    assert part.running


def test_as_many_last_lines_are_read_as_are_asked_for(tmp_path: Path) -> None:
    log, lines = tmp_path / "log", [f"{number} " + "x" * 200 for number in range(3_000)]
    log.write_text("\n".join([*lines, ""]))
    for count in (1, 20, 400, 3_000, 5_000):
        assert tail(log, count).splitlines() == lines[-count:]
    assert tail(log, 20, since=log.stat().st_size - 50) == ("x" * 49)


def test_a_part_that_a_full_disk_keeps_from_starting_is_retried(world: World) -> None:
    broker = world.part("broker")
    launch, failures = broker.launch, [NO_SPACE]

    def launch_at_last() -> subprocess.Popen[bytes]:
        if failures:
            raise failures.pop()
        return launch()

    broker.launch = launch_at_last
    world.kill(broker, restarts=2)
    assert "the broker cannot start: [Errno 28] No space left on device" in world.lines[1]


def test_a_part_that_does_not_become_ready_is_named_with_its_reason(world: World) -> None:
    bridge = world.part("bridge", ready=False)
    bridge.look = lambda pid: Readiness(status="unavailable", reason="missing topics: jobs")
    with pytest.raises(
        CliFailure, match="the bridge was not ready within 0 s: unavailable: missing topics: jobs"
    ) as end:
        world.supervisor.wait_ready(bridge, 0.2)
    assert end.value.exit_code is ExitCode.TIMED_OUT


def test_parts_stop_in_reverse_order_and_stubborn_ones_are_killed(world: World) -> None:
    parts = [world.part("broker"), world.part("gateway", STUBBORN, grace_s=0.3)]
    pids = [part.process.pid for part in parts if part.process is not None]
    world.supervisor.stop()
    assert world.lines == [
        "stopping the gateway",
        "the gateway did not stop within 0 s and was killed",
        "stopping the broker",
    ]
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("name", "code", "reason", "exit_code"),
    [
        ("worker", "print('configuration: worker.inflight_cap: too small'); exit(2)", "inflight_cap", ExitCode.USAGE),
        (
            "gateway", "print('no such table'); exit(1)",
            "the gateway keeps ending while it starts: exit code 1: no such table", ExitCode.FAILED,
        ),
    ],
)  # fmt: skip
def test_a_part_that_cannot_start_is_given_up_with_its_last_line(
    world: World, name: str, code: str, reason: str, exit_code: ExitCode
) -> None:
    broken = world.part(name, code, ready=False)
    with refused(CliFailure, match=reason, exit_code=exit_code):
        world.supervisor.wait_ready(broken, 20)
    assert (broken.restarts == 0) == (exit_code is ExitCode.USAGE), "wrong settings are not retried"
