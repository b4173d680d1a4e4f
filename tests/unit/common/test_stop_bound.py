"""A process that is stopped ends within its bound and logs what it waits for."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, contextlib, logging, signal, threading, time
from penstock.common import process_end, stop_bound
from penstock.common.stop_bound import StopBound, run_process

stop_bound.GIL_S, stop_bound.END_S = 0.3, 0.3
logging.basicConfig(level=logging.INFO, format="%(message)s")

@contextlib.contextmanager
def stopping():
    with StopBound("worker", 0.3, lambda: None) as bound:
        bound.begin()
        yield

{parts}

async def run():
{run}
    return 0

run_process(run())
"""

DEAF = """
async def for_ever():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
"""


def end_of(run: str, parts: str = "") -> subprocess.CompletedProcess[str]:
    """The process that runs these lines to its end, which comes within seconds."""
    lines = "\n".join(f"    {line}" for line in run.splitlines())
    program = PROGRAM.format(parts=parts, run=lines)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)


BLOCK = "def block():\n    time.sleep(60)"
# A call through PyDLL keeps the interpreter's lock, as a library that is stuck in it does.
LOCKED = "import ctypes\ndef block():\n    ctypes.PyDLL(None).sleep(60)"
# A call through CDLL returns to no interpreter that could run a handler of a signal.
IN_C = "import ctypes, os\ndef block():\n    os.kill(os.getpid(), signal.SIGTERM)\n    ctypes.CDLL(None).sleep(60)"
BOUND = "with stopping():\n    block()"
TASK = 'task = asyncio.create_task(for_ever(), name="deaf")\nawait asyncio.sleep(0)\n'
HANGS = r"worker\.stop_hangs seconds=0"
SIGNALS = """\
came = asyncio.Event()
with StopBound("worker", 20, came.set):
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.raise_signal(number)
        await came.wait()
        came.clear()
"""
ANNOUNCED = """\
came, announced = asyncio.Event(), []
def announce():
    announced.append(time.monotonic())
    return 0.5
with StopBound("worker", 20, came.set, announce):
    threading.Thread(target=stop_bound.restart_process).start()
    await came.wait()
assert time.monotonic() - announced[0] >= 0.5
stop_bound._restarts = False
"""
RESTART = """\
came = asyncio.Queue()
with StopBound("worker", 20, lambda: came.put_nowait("asked")):
    if "RESTARTED" in os.environ:
        print("again:", await came.get(), children(), flush=True)
        return 0
    os.environ["RESTARTED"] = "yes"
    stop_bound.END_S = 20
    forkserver.ensure_running()
    threading.Thread(target=stop_bound.restart_process).start()
    await came.get()
{before}
{after}
"""
CHILDREN = """
import os
from multiprocessing import forkserver
import psutil
def children():
    return psutil.Process().children()
"""


@pytest.mark.parametrize(
    ("before", "after", "printed"),
    [
        ("", "signal.raise_signal(signal.SIGTERM)", "again: asked []\n"),
        ("signal.raise_signal(signal.SIGTERM)\nawait asyncio.sleep(0.3)\nassert came.empty()", "", ""),
        ("threading.Thread(target=time.sleep, args=(0.5,)).start()", "os.kill(os.getpid(), signal.SIGTERM)", ""),
    ],
    ids=["pending through exec", "during the stop", "taken by another thread"],
)
def test_a_signal_during_a_restart_is_not_lost(before: str, after: str, printed: str) -> None:
    before = "\n".join(f"    {line}" for line in before.splitlines())
    ended = end_of(RESTART.format(before=before, after=after), CHILDREN)
    assert (ended.returncode, ended.stdout) == (0, printed), ended.stderr


EXECUTOR = "asyncio.get_running_loop().run_in_executor(None, block)\nawait asyncio.sleep(0.1)"
ENDS: dict[str, tuple[str, str, int, str]] = {
    "a stop in time": ("with stopping():\n    await asyncio.sleep(0)\nawait asyncio.sleep(0.8)", "", 0, "^$"),
    "each signal reaches the event loop": (SIGNALS, "", 0, "^$"),
    "a restart is announced first": (ANNOUNCED, "", 0, "^$"),
    "a task that does not end is named with its place": (
        TASK + "task.cancel()\nwith stopping():\n    await asyncio.gather(task)", DEAF, 1,
        rf"(?s){HANGS}.*task=deaf[^\n]*(for_ever[^\n]*sleep|sleep[^\n]*for_ever)",
    ),
    "a blocked event loop": (BOUND, BLOCK, 1, "in block"),
    "blocked with the interpreter's lock": (BOUND, LOCKED, 1, "in block"),
    "a blocked thread of the event loop": (EXECUTOR, BLOCK, 1, "in block"),
    "a blocked thread of the interpreter": ("threading.Thread(target=block).start()", BLOCK, 1, "in block"),
    "a signal while the event loop is blocked": (
        'with StopBound("worker", 0.3, lambda: None):\n    block()', IN_C, 1, HANGS
    ),
    "a forgotten task": (TASK, DEAF, 1, ""),
}  # fmt: skip


@pytest.mark.parametrize(("run", "parts", "code", "logged"), ENDS.values(), ids=ENDS)
def test_the_end_comes_within_its_bound(run: str, parts: str, code: int, logged: str) -> None:
    ended = end_of(run, parts)
    assert ended.returncode == code
    assert re.search(logged, ended.stderr), ended.stderr


# OpenSSL's own cleanup at the exit crashes a thread that uses it: every second time.
BUSY = """
import ssl
def busy():
    while True:
        ssl.create_default_context()
def start_busy():
    for _ in range(3):
        threading.Thread(target=busy, daemon=True).start()
    time.sleep(0.1)
"""


def test_a_daemon_thread_in_a_native_library_does_not_crash_the_end() -> None:
    assert [end_of("start_busy()", BUSY).returncode for _ in range(8)] == [0] * 8


@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        ("return", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no file')", 1, "no file\n"),
        ("raise ValueError('a fault')", 1, "ValueError: a fault\n"),
        ("print('x'); sys.stdout.close(); return", 0, ""),
    ],
)
def test_a_command_ends_without_a_crash_and_with_the_code_of_its_end(ends: str, code: int, says: str) -> None:
    parts = f"{BUSY}import sys\ndef command():\n    start_busy()\n    {ends}\nprocess_end.run_command(command)"
    for _ in range(3):
        ended = end_of("pass", parts)
        assert ended.returncode == code, ended.stderr
        assert ended.stderr.endswith(says)
