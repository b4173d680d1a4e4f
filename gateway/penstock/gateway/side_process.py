"""A process beside the gateway, as the bridge: it runs until a signal, or until it can do no good any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from penstock.common.background import FAULT, on_faults
from penstock.common.configuration import RegistrySection
from penstock.common.stop_bound import StopBound
from penstock.common.threads import in_daemon_thread
from penstock.schemas.errors import PenstockError
from penstock.schemas.registry import Codecs, registry_codecs
from penstock.schemas.texts import without_user

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
STOP_S = 35.0


class SideProcess(Protocol):
    """What `run` runs; it is made on the event loop."""

    @property
    def waits_for(self) -> str | None:
        """Why it does not do all of its work now."""
        ...

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


async def run(
    name: str, health: HealthAddress, registry: RegistrySection, make: Callable[[Over, Codecs], Awaitable[SideProcess]]
) -> int:
    """Run until SIGTERM, SIGINT or `Over.fail`; the exit code. An error of the configuration is logged in one line.

    `name` is that of its section of the settings, and of its log events.
    """
    over = Over(name)
    process: SideProcess | None = None
    step = f"the schema registry at {without_user(registry.url or '')}"

    async def made() -> SideProcess:
        nonlocal step
        codecs = await in_daemon_thread(partial(registry_codecs, registry.url, write=registry.write))
        step = "its files to be opened"
        return await make(over, codecs)

    def asked_to_stop() -> None:
        if not over.code.done():
            waits_for = step if process is None else process.waits_for or "nothing"
            logger.info("%s.stopping waits_for=%s", name, waits_for)
        over.finish()

    on_faults(asyncio.get_running_loop(), lambda: over.fail(FAULT))
    with StopBound(name, STOP_S, asked_to_stop) as bound:
        making = asyncio.create_task(made(), name="start")
        await asyncio.wait({making, over.code}, return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            making.cancel()
            return await over.code
        try:
            process = making.result()
        except PenstockError as error:
            logger.error("%s.cannot_start %s", name, error)
            return EXIT_FAILED
        try:
            process.start()
            return await over.code
        except OSError as error:
            where = f"{health.health_host}:{health.health_port}"
            logger.error(
                "%s.cannot_start %s cannot be bound (%s); set %s.health_port", name, where, error.strerror, name
            )
            return EXIT_FAILED
        finally:
            bound.begin()
            await process.stop()
