"""Processes that are forked in place of executed ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from kit.zygote import Zygote
from penstock.cli.paths import free_port
from support import alive, wait_until

ONE_PID = """
import json, socket, sys

control = socket.socket(fileno=int(sys.argv[1]))
for line in control.makefile():
    number = json.loads(line)["number"]
    reports = [{"number": number, "pid": 77}, *([{"number": number, "code": 3}] if number == 0 else [])]
    control.sendall("".join(json.dumps(one) + "\\n" for one in reports).encode())
"""
"""A kernel that has one pid: the first process ends with 3, the second goes on."""


def test_a_process_whose_pid_an_ended_one_had_is_alive(tmp_path: Path) -> None:
    zygote = Zygote("-c", ONE_PID)
    ended = zygote.start([], {}, tmp_path / "1.log")
    assert ended.wait(30) == 3
    runs = zygote.start([], {}, tmp_path / "2.log")
    assert (runs.pid, runs.poll(), ended.poll()) == (77, None, 3)
    zygote.close()


OWNER = """
import os, sys
from pathlib import Path
from kit.zygote import zygote

print(zygote().start(["gateway"], dict(os.environ), Path(sys.argv[1])).pid, flush=True)
sys.stdin.read()
"""


def test_a_forked_process_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    """A pytest process that is killed leaves no worker or gateway behind."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1",
        "PENSTOCK_GATEWAY__PORT": str(free_port()),
        "PENSTOCK_GATEWAY__VIEW_PATH": str(tmp_path / "view.sqlite"),
    }
    log, pipe = tmp_path / "gateway.log", subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OWNER, str(log)], env=environment, stdin=pipe, stdout=pipe) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        # A gateway waits for its broker for as long as that takes: it ends by this alone.
        wait_until(lambda: "gateway.waits" in log.read_text() or not alive(pid), 60, "the gateway waits for its broker")
        assert alive(pid), log.read_text()
        owner.kill()
    wait_until(lambda: not alive(pid), 60, "the gateway has ended")


FORK_SERVER = """
import multiprocessing, os, sys
from multiprocessing.forkserver import _forkserver

import psutil

from kit.fork_server import keep_fork_server

keep_fork_server()
(kept,) = psutil.Process().children()
os.environ["LATER"] = "set before its start"
code = "import os; print(os.environ['LATER'])"
process = multiprocessing.get_context("forkserver").Process(target=exec, args=(code,))
process.start()
process.join(30)
assert _forkserver._forkserver_pid == kept.pid, (_forkserver._forkserver_pid, kept)
_forkserver._stop()
assert not kept.is_running()
"""


def test_a_kept_fork_server_takes_the_place_of_a_new_one() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", FORK_SERVER], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "set before its start\n"), done.stderr
