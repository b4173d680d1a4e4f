"""The log of a process in both forms: levels by module, and that no line has another form, whoever writes it."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from penstock.common.log_relay import as_json
from penstock.common.log_setup import levels_of

WRITES = """
import ctypes, logging, os, subprocess, sys, threading, warnings
from penstock.common.log_setup import LogConfig, set_up
set_up(LogConfig(format=sys.argv[1], level="info,penstock.loud=debug,httpx=info"))
logging.getLogger("penstock.loud.part").debug("part.begun n=%d", 1)
logging.getLogger("penstock.other").debug("hidden.event")
logging.getLogger("aiokafka").info("hidden too")
for name in ("httpx.inner", "httpx", "modest"):
    for _ in range(2):
        logging.getLogger(name).info("of %s", name)
for _ in range(3):
    logging.getLogger("kafka.conn").warning("repeats")
warnings.warn("old")
print("printed\\ron stdout")
os.write(2, b"native \\xff\\n{\\"time\\": broken\\n")
subprocess.run([sys.executable, "-c", "print('of a child')"])
again = "from penstock.common.log_setup import *; set_up(in_force().__class__(format='json')); logger.error('in.child')"
subprocess.run([sys.executable, "-c", again])
thread = threading.Thread(target=lambda: 1 / 0, name="t")
thread.start()
thread.join()
class Finalized:
    def __del__(self):
        raise OSError("in a finalizer")
Finalized()
print("without an end", end="", flush=True)
if "abort" in sys.argv:
    import faulthandler
    faulthandler.enable()
    os.abort()
raise RuntimeError("uncaught")
"""


def run(*arguments: str) -> list[str]:
    """What a process writes that fails in each way."""
    command = [sys.executable, "-c", WRITES, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    assert ended.returncode == (-6 if "abort" in arguments else 1)
    assert ended.stdout == "" or "json" not in arguments
    return ended.stderr.splitlines()


def written(lines: list[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines]
    assert all(list(one)[:3] == ["time", "level", "logger"] and ("event" in one or "message" in one) for one in found)
    return found


def test_all_that_a_process_writes_is_json() -> None:
    found = written(run("json"))
    said = {one.get("event") or one["message"]: one for one in found}
    assert {"part.begun", "printed", "on stdout", "native �", '{"time": broken'} <= said.keys()
    assert {"of a child", "in.child", "without an end"} <= said.keys()
    assert not {"hidden.event", "hidden too"} & said.keys()
    assert [one["message"] for one in found if one["logger"] == "kafka.conn"] == ["repeats"]
    chosen = [one["message"] for one in found if one.get("message", "").startswith(("of httpx", "of modest"))]
    assert chosen == ["of httpx.inner", "of httpx.inner", "of httpx", "of httpx", "of modest", "of modest"]
    assert any(one["logger"] == "py.warnings" and "old" in one["message"] for one in found)
    assert said["thread.failed"]["thread"] == "t"
    assert "ZeroDivisionError" in said["thread.failed"]["exception"]
    assert "in a finalizer" in said["object.failed"]["exception"]
    assert said["process.failed"]["level"] == "CRITICAL"
    assert "uncaught" in said["process.failed"]["exception"]


def test_the_last_words_of_a_crash_are_kept() -> None:
    assert any("Fatal Python error: Aborted" in one.get("message", "") for one in written(run("json", "abort")))


def test_nothing_is_lost_at_a_restart_which_may_change_the_form() -> None:
    """The relay is killed as soon as it may end, as with a container; a child process keeps its pipe open."""
    code = """if True:
        import os, subprocess, sys
        from penstock.common.log_setup import *
        set_up(LogConfig(format="text" if "AGAIN" in os.environ else "json"))
        if "AGAIN" not in os.environ:
            relay = int(open(f"/proc/self/task/{os.getpid()}/children").read())
            child = subprocess.Popen(["sleep", "60"])
            os.write(2, b"line\\n" * 5000)
            drain()
            os.kill(relay, 9)
            child.kill()
            os.environ["AGAIN"] = "yes"
            os.execv(sys.executable, sys.orig_argv)
        logger.error("in.text")
    """
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    *wrapped, last = ended.stderr.splitlines()
    assert [one["message"] for one in written(wrapped)] == ["line"] * 5000
    assert last.endswith("Z ERROR penstock.common.log_setup in.text")


def test_text_is_as_it_was() -> None:
    lines = run("text")
    assert any(line.endswith("Z DEBUG penstock.loud.part part.begun n=1") for line in lines)
    assert any(line.endswith(" CRITICAL penstock.common.log_setup process.failed") for line in lines)
    assert "RuntimeError: uncaught" in lines


@pytest.mark.parametrize("no_color", [True, False])
def test_levels_are_colored_on_a_terminal(no_color: bool) -> None:
    ours, theirs = pty.openpty()
    code = "from penstock.common.log_setup import *; set_up(LogConfig()); logger.warning('a.b')"
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    subprocess.run(
        [sys.executable, "-c", code],
        stderr=theirs,
        env=environment | ({"NO_COLOR": "1"} if no_color else {}),
        check=True,
    )
    os.close(theirs)
    assert (b"\x1b[33mWARNING\x1b[0m" in os.read(ours, 4096)) is not no_color
    os.close(ours)


def test_levels_by_module() -> None:
    assert levels_of("") == {}
    assert levels_of(" Info , penstock.gateway=DEBUG,") == {"": logging.INFO, "penstock.gateway": logging.DEBUG}
    for text, wrong in {
        "loud": "'loud' is no level: use debug",
        "info,penstock": "'penstock' is no level",
        "a=loud": "'loud'",
        "=info": "'' is no module",
        "a b=info": "'a b' is no module",
        "info,debug": "general level is set twice",
        "a=info,a=debug": "a is set twice",
    }.items():
        with pytest.raises(ValueError, match=wrong):
            levels_of(text)


def test_the_relay_wraps_what_is_not_json() -> None:
    line = b'{"time": "now"}'
    assert as_json(line) is line
    assert json.loads(as_json(b"penstock worker: no Kafka"))["level"] == "ERROR"
    assert json.loads(as_json(b'{"time": "now"'))["message"] == '{"time": "now"'
