"""What is known of forked processes."""

from __future__ import annotations

from pathlib import Path

from kit.zygote import Zygote

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
