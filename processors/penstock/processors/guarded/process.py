"""Processes for hostile input: one job at a time each, ended when late or when the answer breaks the protocol.

What runs in one is a program such as `images/decoder.py` or `engines/guidance/trial.py`, which limits itself by the
kernel's means (`limits.py`). It gets nothing of this process's environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar, cast

from penstock.processors.guarded.wire import write
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SIGXCPU = 24
RENEWED_AFTER = 500
"""Jobs after which a process is replaced: a leak in a library ends with it."""
_START_S = 60.0
_WALL_FACTOR = 4
"""On a busy machine a process gets its processor time late: so many times that long it may take by the clock."""
_TEXT_CHARS = 500
_OUT_OF_MEMORY = frozenset({"memory", "work_memory"})
"""Codes of a refusal after which a process ends by itself."""
_PIPE_BYTES = 1 << 20
"""As much as the kernel gives to everybody."""


class JobStopped(Exception):
    """The job was given up."""


class ProcessEnded(Exception):
    """It is no more. `late`: it took too long; `not_started`: why it never was, for people, else None."""

    def __init__(self, *, late: bool = False, not_started: str | None = None) -> None:
        super().__init__(not_started or ("late" if late else "died"))
        self.late = late
        self.not_started = not_started


class JobRefused(Exception):
    """A guarded process has answered why nothing came of a job: `code` is one of its CODE_*, or an error's.

    `place`: which of several inputs is at fault; `param`: which field.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.code = str(about["code"])
        self.message = _text(about.get("message")) or ""
        self.place = _text(about.get("place"))
        self.param = _text(about.get("param"))
        super().__init__(self.message)


def _text(value: Any) -> str | None:
    """What a guarded process has written, as a short text that fits into any record; None for what is no text."""
    return shortened(value, _TEXT_CHARS) if isinstance(value, str) else None


class GuardedProcess:
    """`python -m PROGRAM NUMBERS…`, started with its first job. Its methods block; `end` is for any thread.

    `files`: descriptors that it inherits under the same numbers.
    """

    def __init__(self, program: str, numbers: Sequence[int], files: Sequence[int] = ()) -> None:
        self._program, self._numbers, self._files = program, numbers, files
        self._process: subprocess.Popen[bytes] | None = None
        self._served = 0
        self._ended = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def worn(self) -> bool:
        return self._served >= RENEWED_AFTER

    def ask(
        self, job: dict[str, Any], bodies: Sequence[bytes | memoryview], cpu_s: int, read: Callable[[BinaryIO], T]
    ) -> T:
        """Give it a job and what belongs to it; what `read` makes of its answer.

        `cpu_s`: what it may take of a processor, which the kernel counts; by the clock it gets four times that. `read`
        raises OSError, EOFError, ValueError or KeyError for what is no answer: the process is ended then, and Ended
        raised. Whatever else it raises goes to the caller, and the process goes on.
        """
        process = self.started()
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        # The kernel counts its processor time; this ends one that neither works nor answers.
        timer = threading.Timer(_START_S + _WALL_FACTOR * cpu_s, kill)
        timer.daemon = True
        timer.start()
        self._served += 1
        try:
            write(cast("BinaryIO", process.stdin), job, *bodies)
            return read(cast("BinaryIO", process.stdout))
        except (OSError, ValueError, KeyError, EOFError) as error:
            process.kill()
            code = process.wait()
            logger.warning("guarded.process_ended program=%s pid=%d exit_code=%d", self._program, process.pid, code)
            raise ProcessEnded(late=late.is_set() or code == -_SIGXCPU) from error
        finally:
            timer.cancel()

    def started(self) -> subprocess.Popen[bytes]:
        """Start it, if it is not yet. Raises Ended."""
        with self._lock:
            if self._ended:
                raise ProcessEnded(not_started="the worker stops")
            if self._process is None:
                self._process = self._start()
                _widen(self._process)
            return self._process

    def end(self) -> None:
        with self._lock:
            self._ended = True
            process = self._process
        if process is not None:
            process.kill()
            threading.Thread(target=_reap, args=(process,), name="guarded-process-end", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", self._program, *map(str, self._numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # libraries write there what they find in an input
                env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # no secrets where input is opened
                pass_fds=self._files,
                cwd="/",
            )
        except OSError as error:
            raise ProcessEnded(not_started=type(error).__name__) from error


class GuardedPool:
    """Processes of one program, for any thread: each has one job at a time, and is replaced when it ends."""

    def __init__(self, program: str, numbers: Sequence[int], files: Sequence[int] = ()) -> None:
        """As of `GuardedProcess`."""
        self._program, self._numbers, self._files = program, numbers, files
        self._lock = threading.Lock()
        self._idle: list[GuardedProcess] = []
        self._at_work: dict[str, GuardedProcess] = {}
        self._closed = False

    def start(self, count: int) -> None:
        """Start so many processes, so that the first jobs need not wait. Raises Ended."""
        for _ in range(count):
            process = GuardedProcess(self._program, self._numbers, self._files)
            process.started()
            self._idle.append(process)

    @contextlib.contextmanager
    def process(self, key: str) -> Generator[GuardedProcess]:
        """A process for one job, which `key` names for `stop`.

        It is used again unless the block is left by an exception other than a Refusal. Raises Ended when the pool is
        closed, and Stopped in place of Ended when `stop` or `close` has ended the job.
        """
        process = self._take(key)
        reusable = False
        try:
            yield process
            reusable = True
        except JobRefused as error:  # the input's fault: the process goes on
            reusable = error.code not in _OUT_OF_MEMORY
            raise
        except ProcessEnded:
            if self._at_work.get(key) is not process:
                raise JobStopped from None
            raise
        finally:
            self._put_back(key, process, reusable=reusable)

    def stop(self, key: str) -> None:
        """End the process that has this job, if one has."""
        with self._lock:
            process = self._at_work.pop(key, None)
        if process is not None:
            process.end()

    def at_work(self) -> set[str]:
        """The keys of the jobs that a process has."""
        with self._lock:
            return set(self._at_work)

    def pids(self) -> set[int]:
        """The processes that run now."""
        with self._lock:
            processes = [*self._idle, *self._at_work.values()]
        return {pid for process in processes if (pid := process.pid) is not None}

    def close(self) -> None:
        """End all processes, and start no more."""
        with self._lock:
            self._closed = True
            processes = [*self._idle, *self._at_work.values()]
            self._idle.clear()
            self._at_work.clear()
        for process in processes:
            process.end()

    def _take(self, key: str) -> GuardedProcess:
        with self._lock:
            if self._closed:
                raise ProcessEnded(not_started="the worker stops")
            while self._idle:
                process = self._idle.pop()
                if process.alive:
                    break
                process.end()  # somebody ended it while it waited: no input is at fault
            else:
                process = GuardedProcess(self._program, self._numbers, self._files)
            self._at_work[key] = process
            return process

    def _put_back(self, key: str, process: GuardedProcess, *, reusable: bool) -> None:
        with self._lock:
            if at_work := self._at_work.get(key) is process:
                del self._at_work[key]
            kept = at_work and reusable and not process.worn
            if kept:
                self._idle.append(process)
        if not kept:
            process.end()


def _widen(process: subprocess.Popen[bytes]) -> None:
    """Images go through these pipes, 64 KiB at a time if nothing is said: each time one side waits for the other."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            fcntl.fcntl(cast("BinaryIO", pipe), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _reap(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError), process:  # what was still being sent to it is dropped
        pass
