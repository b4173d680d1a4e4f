"""Starts Penstock's commands by fork from a process that has imported them: a quarter of the processor time of an exec.

`Zygote.start` returns a process of its own with its own pid, session, log and environment, which runs the code of
`python -m penstock.cli.main COMMAND`. This file is also the program of the process that forks: it must have one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

IMPORTED = ("penstock.gateway.app", "penstock.processors.app", "penstock.cli.main")
ENGINES = "penstock.processors.engines.process.preload"
"""What a fork server of engines imports."""


class Forked:
    """One started process, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, number: int, pid: int, exits: _Exits) -> None:
        self.pid = pid
        self._number = number
        self._exits = exits

    @property
    def returncode(self) -> int | None:
        return self._exits.get(self._number, 0)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        code = self._exits.get(self._number, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        # The zygote may have collected it a moment ago.
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class _Exits:
    """The exit codes of ended processes, negative for a signal, as `subprocess` has them.

    By the numbers of their orders: the kernel gives the pid of an ended process to another one.
    """

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._changed = threading.Condition()

    def put(self, number: int, code: int) -> None:
        with self._changed:
            self._codes[number] = code
            self._changed.notify_all()

    def get(self, number: int, timeout: float | None) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: number in self._codes, timeout)
            return self._codes.get(number)


class Zygote:
    """The forking process and what it reports. It ends when this process ends or closes its socket.

    `program`: Python's arguments, to which the number of its socket is added. `path`: its PYTHONPATH.
    """

    def __init__(self, *program: str, path: str = "") -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, *program, str(theirs.fileno())]
            env = {**os.environ, "PYTHONPATH": path} if path else None
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=env)
        self._socket = ours
        self._lines = ours.makefile("r")
        self._exits = _Exits()
        self._pids: dict[int, int] = {}
        self._numbers = count()
        self._started = threading.Condition()
        threading.Thread(target=self._read, name="zygote", daemon=True).start()

    def start(self, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        order = {"arguments": list(arguments), "env": dict(env), "log": str(log), "cwd": os.getcwd()}
        log.touch()  # a test may read it before the process has opened it
        with self._started:
            number = next(self._numbers)
            self._socket.sendall(json.dumps({**order, "number": number}).encode() + b"\n")
            if not self._started.wait_for(lambda: number in self._pids, 120):
                raise AssertionError(f"the zygote did not start {arguments}: it exited with {self._process.poll()}")
            return Forked(number, self._pids.pop(number), self._exits)

    def close(self) -> None:
        """End the forking process, and those that it started."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(30)

    def _read(self) -> None:
        for line in self._lines:
            report = json.loads(line)
            if "code" in report:
                self._exits.put(report["number"], report["code"])
            else:
                with self._started:
                    self._pids[report["number"]] = report["pid"]
                    self._started.notify_all()


@cache
def zygote(*, engines: bool = False, path: str = "") -> Zygote:
    """This process's own. `engines`: the one that has imported what engines need; its processes have a fork server.

    `path`: the PYTHONPATH of another release.
    """
    return Zygote(__file__, *([ENGINES] if engines else []), path=path)


def serve(control: socket.socket) -> None:
    """Fork for each order until the other side has gone. Returns in each forked process, set up to run its command."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    orders = b""
    running: dict[int, int] = {}
    """The numbers of the orders, by pid."""
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_ended(control, running)
        if control not in ready:
            continue
        if not (more := control.recv(65536)):
            sys.exit(0)
        *whole, orders = (orders + more).split(b"\n")
        for order in map(json.loads, whole):
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for number in (woken, wake):
                    os.close(number)
                control.close()
                _become(order)
                return
            running[pid] = order["number"]
            _send(control, number=order["number"], pid=pid)


def _report_ended(control: socket.socket, running: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _send(control, number=running.pop(ended[0]), code=os.waitstatus_to_exitcode(ended[1]))


def _send(control: socket.socket, **report: Any) -> None:
    try:
        control.sendall(json.dumps(report).encode() + b"\n")
    except OSError:
        sys.exit(0)  # the tests have ended


def _become(order: Mapping[str, Any]) -> None:
    """Make of a fork what an exec would have made: session, log, environment, arguments, main module."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    os.close(nothing)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    if SWITCH in os.environ:
        report_files_on_the_loop()
    sys.argv = ["penstock", *order["arguments"]]
    # Processes that the command starts import the main module by its name.
    sys.modules["__main__"] = sys.modules["penstock.cli.main"]
    if ENGINES in sys.modules:
        keep_fork_server()


if __name__ == "__main__":
    import gc
    import importlib

    sys.path[0] = str(Path(__file__).parent.parent)
    from kit.fork_server import keep_fork_server
    from kit.loop_files import SWITCH, report_files_on_the_loop

    del sys.path[0]
    *more, descriptor = sys.argv[1:]
    for module in (*IMPORTED, *more):
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()  # a fork does not copy what its collector need not look at
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    serve(socket.socket(fileno=int(descriptor)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["penstock.cli.main"].main()
