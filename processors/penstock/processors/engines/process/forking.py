"""Engine processes from a fork server that has torch imported: starting one takes 0.2 s in place of 24 s.

The first start waits while the fork server imports. That wait is in a thread which cannot be interrupted; when nobody
wants its process any more the importing fork server is killed instead, so that the wait ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from typing import Any

from penstock.common.threads import in_daemon_thread

logger = logging.getLogger(__name__)

PRELOAD = "penstock.processors.engines.process.preload"


class _ForkServer:
    """The one of this process (multiprocessing has no more), and who waits for it."""

    def __init__(self) -> None:
        self._waiting: set[object] = set()
        self._imported_pid: int | None = None
        """The fork server that has answered, and so is not importing any more."""

    async def start_process(
        self, target: Callable[..., None], sock: socket.socket, arguments: tuple[Any, ...], name: str
    ) -> Any:
        """A running multiprocessing.Process with this socket, which it takes over, as its first argument.

        When the caller is cancelled, a process that starts all the same is killed. Raises OSError, EOFError when no
        fork server comes up.
        """
        wanted = [True]
        token = object()
        self._waiting.add(token)
        try:
            return await in_daemon_thread(self._start, target, sock, arguments, name, wanted)
        except asyncio.CancelledError:
            wanted[0] = False
            self._waiting.discard(token)
            self._kill_unless_wanted()
            raise
        finally:
            self._waiting.discard(token)

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
        os.kill(pid, signal.SIGKILL)
        _server()._stop()  # reaps it; the next start begins with a new one


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    return context


def _server() -> Any:
    return getattr(forkserver, "_forkserver")  # noqa: B009  (pyright: a private name, whose shape a test holds)


def _server_pid() -> int | None:
    return _server()._forkserver_pid


start_process = _ForkServer().start_process
