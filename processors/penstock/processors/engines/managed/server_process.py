"""A managed server as the worker holds it: started by its keeper (keeper.py), looked at, ended.

All of it runs on Linux alone: the keeper needs /proc, subreapers and pidfds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from penstock.common.background import BackgroundTasks
from penstock.common.threads import in_daemon_thread
from penstock.processors.hardware import processes as hardware
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

KEEPER = Path(__file__).with_name("keeper.py")
LOG_LIMIT_BYTES = 20_000_000
TAIL_BYTES = 4_096
LINE_CHARS = 200
KEEPER_WITHIN_S = 5.0
"""So long may a keeper take to end its tree. It may be stopped (SIGSTOP): then it is killed, and the tree with it."""
DEAD_WITHIN_S = 5.0
"""So long may the kernel take to end a tree that is being killed, before the worker goes on without it."""
LOOK_S = 0.05


class ServerProcess:
    """One server with all that it starts. `on_exit` gets its exit code once, when the whole tree has ended."""

    def __init__(self, log: Path, on_exit: Callable[[int], None], *, grace_s: float) -> None:
        self.log = log
        self._on_exit = on_exit
        self._grace_s = grace_s
        self._keeper: asyncio.subprocess.Process | None = None
        self._waiter: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()
        self.left = False
        """It was killed and has not ended since: the kernel holds a process of it, as in a call of a driver."""
        self._seen: list[psutil.Process] = []
        """The tree when it was looked at last."""

    @property
    def pid(self) -> int | None:
        """Of the keeper: the root of the tree."""
        return None if self._keeper is None else self._keeper.pid

    async def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Raises OSError. A caller who is cancelled calls `end`."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [str(self._grace_s), str(self.log), str(LOG_LIMIT_BYTES), *command]
        self._keeper = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(KEEPER),
            *arguments,
            stdin=asyncio.subprocess.PIPE,  # it closes when this process ends, and the keeper sees that
            stdout=asyncio.subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,  # signals of a terminal are for the worker
        )
        self._waiter = self._tasks.start(self._wait(), f"server {self._keeper.pid}")

    async def _wait(self) -> None:
        assert self._keeper is not None
        code = await self._keeper.wait()
        if code < 0:  # the keeper was killed: the server goes by its death signal, and what it started by us
            kill_all(self._seen)
            while any(map(is_alive, self._seen)):
                await asyncio.sleep(LOOK_S)
        if self.left:
            logger.warning("engine.left_process_ended engine=%s pid=%s", self.log.stem, self.pid)
        self.left = False
        self._on_exit(code)

    async def end(self, *, orderly: bool = True) -> None:
        """End the tree: SIGTERM and the grace when `orderly`, then SIGKILL. Returns when it has ended, or is `left`.

        The keeper is asked, and killed itself if it does not answer.
        """
        if self._keeper is None or self._waiter is None or self.left:
            return
        pipe = self._keeper.stdin
        if pipe is not None and self._keeper.returncode is None:
            if orderly:
                with contextlib.suppress(OSError):
                    pipe.write(b"x")
                await asyncio.wait([self._waiter], timeout=self._grace_s + 1)
            pipe.close()
        await asyncio.wait([self._waiter], timeout=KEEPER_WITHIN_S)
        if self._keeper.returncode is None:
            logger.warning("managed.keeper_hangs engine=%s pid=%s: it is killed", self.log.stem, self.pid)
            await self.look()
            kill_all(self._seen)
        done, _ = await asyncio.wait([self._waiter], timeout=DEAD_WITHIN_S)
        if not done:
            self.left = True
            logger.error(
                "engine.does_not_end engine=%s pid=%s: SIGKILL has no effect yet; it is left", self.log.stem, self.pid
            )

    def last_line(self) -> str:
        """What it said last, for the worker's log; empty when it said nothing."""
        return last_line(self.log)

    async def look(self) -> int | None:
        """See who belongs to the tree. The memory that is its alone; None when it is gone."""
        pid = self.pid
        if pid is None:
            return None
        seen = await in_daemon_thread(tree, pid)
        self._seen = seen or self._seen
        return await in_daemon_thread(own_bytes, seen)

    async def signs_of_life(self) -> object:
        """What changes while a server works, of the tree as it was looked at last, without the keeper."""
        return await in_daemon_thread(signs_of_life, self.log, self._seen[1:])

    async def listens(self, port: int) -> bool:
        """Whether a process of the tree listens on a port; True where that cannot be seen."""
        pid = self.pid
        return False if pid is None else await in_daemon_thread(tree_listens, pid, port)


def last_line(log: Path) -> str:
    """The last line of a log that says something, shortened."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    except OSError:
        return ""
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return shortened("".join(char for char in said if char.isprintable()), LINE_CHARS)


def tree(root: int) -> list[psutil.Process]:
    """A process and all its descendants; nothing when it is gone."""
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil knows a pid that is another's by now


def is_alive(process: psutil.Process) -> bool:
    """False also for a process that has ended and that its parent has not reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def signs_of_life(log: Path, processes: Sequence[psutil.Process]) -> object:
    """The size of the log; of each process, its processor time and what it has read."""
    work: dict[int, object] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            work[process.pid] = process.cpu_times()
            reads = process.io_counters()
            work[process.pid] = work[process.pid], reads.read_chars, reads.read_bytes
    return log.stat().st_size if log.exists() else 0, work


def own_bytes(processes: Sequence[psutil.Process]) -> int | None:
    """The sum of what belongs to each alone, in bytes; None when all are gone."""
    found = [size for process in processes if (size := hardware.own_bytes(process.pid)) is not None]
    return sum(found) if found else None


def tree_listens(root: int, port: int) -> bool:
    for process in tree(root):
        try:
            connections = process.net_connections(kind="tcp")
        except (psutil.AccessDenied, OSError):
            return True
        except psutil.Error:
            continue
        if any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in connections):
            return True
    return False


def free_port(host: str, wanted: int | None) -> int:
    """The wanted port, or any, that nobody listens on now. Raises OSError."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, wanted or 0))
        return int(sock.getsockname()[1])
