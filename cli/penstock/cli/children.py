"""Child processes that cannot outlive their parent: own session, log file, death signal, bounded stop.

Linux sends the death signal when the *thread* that started a child ends, so every child is started from one thread that
lives as long as the process. The signal is set by a tiny Python that then becomes the program: no code of ours runs
between fork and exec of a process that has threads.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path

from penstock.schemas.texts import shortened

LOG_LIMIT_BYTES = 20_000_000
_ERROR = re.compile(r"^penstock( \w+)?: |\b(ERROR|CRITICAL|FATAL)\b|Exception\b")
"""What a part or a broker writes in a line that reports an error."""

_LAUNCHER = """\
import ctypes, os, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        os._exit(137)
os.execvp(argv[0], argv)
"""


class _Starter:
    """The one thread that starts children."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], Callable[[], subprocess.Popen[bytes]]]]
        self._jobs = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="child-starter", daemon=True).start()

    def _serve(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

    def run(self, job: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        self._jobs.put((future, job))
        return future.result()


@cache
def _starter(pid: int) -> _Starter:
    """One per process: a forked child must not use its parent's thread."""
    return _Starter()


def rotate_log(log: Path) -> None:
    """Keep one older log beside a log that has grown too large."""
    if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
        log.replace(log.with_name(log.name + ".1"))


def shorten_log(log: Path) -> None:
    """As `rotate_log`, while a process appends to it. What it writes meanwhile may be lost."""
    if size(log) > LOG_LIMIT_BYTES:
        shutil.copyfile(log, log.with_name(log.name + ".1"))
        os.truncate(log, 0)


def spawn(argv: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start `argv` in a session of its own, its output appended to `log`; it is killed when this process dies."""
    log.parent.mkdir(parents=True, exist_ok=True)
    rotate_log(log)
    command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv]

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(os.environ) if env is None else dict(env),
                start_new_session=True,
            )

    return _starter(os.getpid()).run(start)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a child and all that it started, at once."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def stop(process: subprocess.Popen[bytes], *, grace_s: float) -> int:
    """SIGTERM, wait up to `grace_s`, then SIGKILL to the whole group. Returns the exit code."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    kill_group(process)
    assert process.returncode is not None
    return process.returncode


def size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def tail(log: Path, lines: int = 20, since: int = 0) -> str:
    """The last lines of a log, those before the offset `since` left out; empty when there is none."""
    if not log.exists():
        return ""
    begin = size(log)
    first = since if since <= begin else 0  # a rotated log begins at 0
    text, block = b"", 64 * 1024
    with log.open("rb") as file:
        while begin > first and text.count(b"\n") <= lines:
            end, begin = begin, max(first, begin - block)
            file.seek(begin)
            text, block = file.read(end - begin) + text, 2 * block
    return "\n".join(text.decode(errors="replace").splitlines()[-lines:])


def _plain(line: str) -> str:
    """A line of a log in JSON as the other form has it, without its fields."""
    try:
        found = json.loads(line)
        said = [found[key] for key in ("level", "logger", "event", "message", "exception") if found.get(key)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return line
    return said[2] if said[1:2] == ["output"] else " ".join(" ".join(map(str, said)).split())


def last_words(log: Path, since: int = 0) -> str:
    """The last line of a log that reports an error, else the last line that is not empty; short."""
    lines = [_plain(line.strip()) for line in tail(log, 200, since).splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    return shortened((errors or lines)[-1], 300) if lines else f"nothing in {log}"
