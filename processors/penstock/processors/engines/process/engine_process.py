"""The process of an engine as the worker holds it: started, spoken to, and its end noticed. No thread waits for it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from penstock.common.log_setup import in_force
from penstock.processors.engines.process import child
from penstock.processors.engines.process.channel import Channel
from penstock.processors.engines.process.forking import start_process

logger = logging.getLogger(__name__)

DEAD_WITHIN_S = 10.0
GRACE_S = 1.0
"""So long may a process live without its channel, or the channel without the process, before it is made to end."""


class EngineProcess:
    """`on_events` gets each list of events, `on_lost` is called once when the process can no longer be spoken to."""

    def __init__(
        self, name: str, on_events: Callable[[list[tuple[Any, ...]]], None], on_lost: Callable[[], None]
    ) -> None:
        self._name = name
        self._on_events = on_events
        self._on_lost = on_lost
        self._process: Any = None
        self._channel: Channel | None = None
        self._lost = False
        self.left = False
        """It was killed and has not ended since: the kernel holds it, as in a call of a driver."""
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, backend: str, source: str, options: Mapping[str, Any], silent_s: float) -> None:
        """Fork it. Raises OSError, EOFError. A caller who is cancelled leaves no process behind."""
        ours, theirs = socket.socketpair()
        try:
            # The first start imports torch in the fork server: seconds.
            arguments = (backend, source, options, in_force())
            self._process = await start_process(child.main, theirs, arguments, f"engine-{self._name}", silent_s)
        except BaseException:
            ours.close()
            raise
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._exited)
        try:
            self._channel = await Channel.open(ours, self._on_events, self._channel_lost)
        except BaseException:
            ours.close()
            self.kill()
            raise

    def send(self, message: tuple[Any, ...]) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def killed(self) -> int | None:
        """The exit code of a process that was killed; None, and `left` is set, when it does not end in time."""
        await asyncio.wait([self._exit_code], timeout=DEAD_WITHIN_S)
        if self._exit_code.done():
            return self._exit_code.result()
        logger.error(
            "engine.does_not_end engine=%s pid=%s: SIGKILL has no effect yet; it is left", self._name, self.pid
        )
        self.left = True
        return None

    async def end(self, patience_s: float) -> int | None:
        """Its exit code: it is asked to stop, and made to when it does not within the patience."""
        if self._process is None:
            return None
        self._lost = True  # nothing is to be reported
        if patience_s > 0 and self._channel is not None:
            self._channel.send(("stop",))
            await asyncio.wait([self._exit_code], timeout=patience_s)
        if not self._exit_code.done():
            self.kill()
        return await self.killed()

    # -- its end: the channel closes, the process exits, in either order

    def _channel_lost(self) -> None:
        self._tell_lost()
        if not self._exit_code.done():
            asyncio.get_running_loop().call_later(GRACE_S, self._kill_if_alive)

    def _kill_if_alive(self) -> None:
        if not self._exit_code.done():
            self.kill()

    def _exited(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        code = self._process.exitcode
        if self.left:
            logger.warning("engine.left_process_ended engine=%s pid=%s", self._name, self.pid)
        self.left = False
        if not self._exit_code.done():
            self._exit_code.set_result(-1 if code is None else int(code))
        if self._lost:
            self._close_channel()
        else:  # what it sent last is still to be read
            loop.call_later(GRACE_S, self._after_exit)

    def _after_exit(self) -> None:
        self._close_channel()
        self._tell_lost()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _tell_lost(self) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost()
