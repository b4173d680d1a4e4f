"""Engine processes from a fork server that has torch imported: starting one takes 0.2 s in place of 24 s.

The first start waits while the fork server imports. That wait is in a thread which cannot be interrupted; when nobody
wants its process any more the importing fork server is killed instead, so that the wait ends at once. A fork server
that hangs is killed too: the next start begins with a new one.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from typing import Any

import psutil

from penstock.common.threads import in_daemon_thread

logger = logging.getLogger(__name__)

PRELOAD = "penstock.processors.engines.process.preload"
LOOKS = 10
"""How often a fork server is looked at within the time in which it must show a sign of life."""


class _ForkServer:
    """The one of this process (multiprocessing has no more), and who waits for it."""

    def __init__(self) -> None:
        self._waiting: set[object] = set()
        self._imported_pid: int | None = None
        """The fork server that has answered, and so is not importing any more."""
        self._ending: threading.Thread | None = None
        """Waits for the end of a fork server that was killed: the kernel may hold it for long."""

    async def start_process(
        self, target: Callable[..., None], sock: socket.socket, arguments: tuple[Any, ...], name: str, silent_s: float
    ) -> Any:
        """A running multiprocessing.Process with this socket, which it takes over, as its first argument.

        When the caller is cancelled, a process that starts all the same is killed. Raises OSError, EOFError when no
        fork server comes up, or it used no processor time for `silent_s` seconds and was killed.
        """
        wanted = [True]
        token = object()
        self._waiting.add(token)
        starting = asyncio.ensure_future(in_daemon_thread(self._start, target, sock, arguments, name, wanted))
        try:
            await self._while_it_lives(starting, silent_s)
            return starting.result()
        except asyncio.CancelledError:
            wanted[0] = False
            starting.cancel()
            self._waiting.discard(token)
            self._kill_unless_wanted()
            raise
        finally:
            self._waiting.discard(token)

    async def _while_it_lives(self, starting: asyncio.Future[Any], silent_s: float) -> None:
        """Until the start has ended. Looks are counted, not seconds: this process may itself have stood still."""
        looks, spent = 0, -1.0
        while not (await asyncio.wait([starting], timeout=silent_s / LOOKS))[0]:
            pid = _server_pid()
            before, spent = spent, _processor_time(pid)
            looks = looks + 1 if spent == before else 0
            if looks == LOOKS and pid is not None:
                logger.error("forkserver.silent pid=%d seconds=%g: it is killed", pid, silent_s)
                self._kill(pid)
                starting.cancel()
                raise OSError(f"the fork server {pid} gave no sign of life for {silent_s:g} s")

    def _start(
        self,
        target: Callable[..., None],
        sock: socket.socket,
        arguments: tuple[Any, ...],
        name: str,
        wanted: list[bool],
    ) -> Any:
        # The socket is closed here, not by a caller who was cancelled: its number may be another file's by then.
        with sock:
            if self._ending is not None:
                self._ending.join()
            _context()
            forkserver.ensure_running()
            if not wanted[0]:  # cancelled before there was a fork server to kill
                self._kill_unless_wanted()
                return None
            # A daemon is terminated when this interpreter ends, should nobody have stopped it before.
            process: Any = _context().Process(target=target, args=(sock, *arguments), name=name, daemon=True)
            process.start()
        self._imported_pid = _server_pid()
        if not wanted[0]:
            process.kill()
        return process

    def _kill_unless_wanted(self) -> None:
        """End a fork server that still imports, if nobody waits for it: its thread then ends too."""
        pid = _server_pid()
        if self._waiting or pid is None or pid == self._imported_pid:
            return
        logger.info("forkserver.killed pid=%d: it was importing, and nobody waits for it", pid)
        self._kill(pid)

    def _kill(self, pid: int) -> None:
        """The threads that wait for it get EOFError; the next start begins with a new one."""
        if self._ending is not None and self._ending.is_alive():
            return
        os.kill(pid, signal.SIGKILL)
        self._ending = threading.Thread(target=_server()._stop, name="end of the fork server", daemon=True)
        self._ending.start()


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


def _server() -> Any:
    return getattr(forkserver, "_forkserver")  # noqa: B009  (pyright: a private name, whose shape a test holds)


def _server_pid() -> int | None:
    return _server()._forkserver_pid


def _processor_time(pid: int | None) -> float | None:
    try:
        spent = None if pid is None else psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return None if spent is None else spent.user + spent.system


start_process = _ForkServer().start_process
