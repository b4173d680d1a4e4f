"""The process of an engine as the worker holds it: started, spoken to, and its end noticed. No thread waits for it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

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
        self._exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, backend: str, source: str, options: Mapping[str, Any]) -> None:
        """Fork it. Raises OSError, EOFError. A caller who is cancelled leaves no process behind."""
        ours, theirs = socket.socketpair()
        try:
            # The first start imports torch in the fork server: seconds.
            self._process = await start_process(child.main, theirs, (backend, source, options), f"engine-{self._name}")
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

    async def exit_code(self) -> int | None:
        """Wait for its end; None when it was never started."""
        return None if self._process is None else await asyncio.shield(self._exit_code)

    async def end(self, patience_s: float) -> int | None:
        """Its exit code: it is asked to stop, and made to when it does not within the patience."""
        if self._process is None:
            return None
        self._lost = True  # nobody needs to be told
        if patience_s > 0 and self._channel is not None:
            self._channel.send(("stop",))
            await asyncio.wait([self._exit_code], timeout=patience_s)
        if not self._exit_code.done():
            self.kill()
            await asyncio.wait([self._exit_code], timeout=DEAD_WITHIN_S)
        if not self._exit_code.done():  # the kernel holds it, as in a driver: the worker's end does not wait for that
            logger.error("engine.does_not_end pid=%s", self.pid)
            return None
        return self._exit_code.result()

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
