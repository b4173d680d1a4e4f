"""A process that is stopped ends within its bound and logs what it waits for."""

from __future__ import annotations

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


def test_a_stop_in_time_logs_nothing() -> None:
    ended = end_of("with stopping():\n    await asyncio.sleep(0)\nawait asyncio.sleep(0.8)")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_task_that_does_not_end_is_named_with_its_place() -> None:
    run = 'task = asyncio.create_task(for_ever(), name="deaf")\nawait asyncio.sleep(0)\ntask.cancel()\n'
    ended = end_of(run + "with stopping():\n    await asyncio.gather(task)", DEAF)
    assert ended.returncode == 1
    assert "worker.stop_hangs seconds=0" in ended.stderr
    (deaf,) = [line for line in ended.stderr.splitlines() if "task=deaf" in line]
    assert "for_ever" in deaf
    assert "sleep" in deaf


BLOCK = "def block():\n    time.sleep(60)"
# A call through PyDLL keeps the interpreter's lock, as a library that is stuck in it does.
LOCKED = "import ctypes\ndef block():\n    ctypes.PyDLL(None).sleep(60)"
BOUND = "with stopping():\n    block()"
EXECUTOR = "asyncio.get_running_loop().run_in_executor(None, block)\nawait asyncio.sleep(0.1)"


@pytest.mark.parametrize(
    ("run", "parts"),
    [(BOUND, BLOCK), (BOUND, LOCKED), (EXECUTOR, BLOCK), ("threading.Thread(target=block).start()", BLOCK)],
    ids=["the event loop", "with the interpreter's lock", "a thread of the event loop", "a thread of the interpreter"],
)
def test_a_blocked_thread_is_shown_and_does_not_hold_the_end(run: str, parts: str) -> None:
    ended = end_of(run, parts)
    assert ended.returncode == 1
    assert "in block" in ended.stderr


# A call through CDLL returns to no interpreter that could run a handler of a signal.
IN_C = "import ctypes, os\ndef block():\n    os.kill(os.getpid(), signal.SIGTERM)\n    ctypes.CDLL(None).sleep(60)"


def test_the_bound_counts_from_the_signal_also_while_the_event_loop_is_blocked() -> None:
    ended = end_of('with StopBound("worker", 0.3, lambda: None):\n    block()', IN_C)
    assert ended.returncode == 1
    assert "worker.stop_hangs seconds=0" in ended.stderr


def test_each_signal_is_passed_to_the_event_loop() -> None:
    run = "came = asyncio.Event()\nwith StopBound('worker', 20, came.set):\n    signal.raise_signal(signal.SIGTERM)\n"
    ended = end_of(
        run + "    await came.wait()\n    came.clear()\n    signal.raise_signal(signal.SIGINT)\n    await came.wait()"
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_forgotten_task_does_not_hold_the_end() -> None:
    ended = end_of('task = asyncio.create_task(for_ever(), name="deaf")\nawait asyncio.sleep(0)', DEAF)
    assert ended.returncode == 1


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
