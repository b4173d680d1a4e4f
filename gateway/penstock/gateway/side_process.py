"""A process beside the gateway, as the bridge: it runs until a signal, or until it can do no good any more."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Protocol

from penstock.common.stop_bound import bounded_stop
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
STOP_S = 35.0


class SideProcess(Protocol):
    """What `run` runs; it is made on the event loop."""

    def start(self) -> None:
        """Raises OSError when the port of its health is taken."""
        ...

    async def stop(self) -> None:
        """In order; also when `start` failed."""
        ...


class HealthAddress(Protocol):
    """The section of a process's settings that says where its health is."""

    @property
    def health_host(self) -> str: ...
    @property
    def health_port(self) -> int: ...


class Over:
    """When a process is over, and with which exit code."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def finish(self, code: int = EXIT_OK) -> None:
        if not self.code.done():
            self.code.set_result(code)

    def fail(self, reason: str) -> None:
        """Only a new process can go on."""
        logger.critical("%s.ended reason=%s", self._name, reason)
        self.finish(EXIT_FAILED)


async def run(name: str, health: HealthAddress, make: Callable[[Over], SideProcess]) -> int:
    """Run until SIGTERM, SIGINT or `Over.fail`; the exit code. What a user can mend is told in one line.

    `name` is that of its section of the settings, and of its log events.
    """
    over = Over(name)
    try:
        process = make(over)
    except PenstockError as error:
        logger.error("%s.cannot_start %s", name, error)
        return EXIT_FAILED
    try:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, over.finish)
        process.start()
        return await over.code
    except OSError as error:
        where = f"{health.health_host}:{health.health_port}"
        logger.error("%s.cannot_start %s cannot be bound (%s); set %s.health_port", name, where, error.strerror, name)
        return EXIT_FAILED
    finally:
        with bounded_stop(f"{name}.stop_hangs", STOP_S):
            await process.stop()
