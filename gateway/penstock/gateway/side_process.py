"""A process beside the gateway, as the bridge: it runs until a signal, or until it can do no good any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from penstock.common.background import FAULT, on_faults
from penstock.common.certificates import Certificates
from penstock.common.configuration import RegistrySection
from penstock.common.settings import KafkaSettings
from penstock.common.starting import Starting
from penstock.common.stop_bound import StopBound
from penstock.common.threads import in_daemon_thread
from penstock.common.transport import Transport
from penstock.gateway.health_server import Degraded, HealthServer
from penstock.gateway.reporting import Reporter
from penstock.schemas.errors import PenstockError
from penstock.schemas.registry import Codecs, registry_codecs
from penstock.schemas.texts import without_user

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
STOP_S = 35.0
DELIVERY_S, FLUSH_S = 10.0, 2.0
"""A report is tried for so long, and a stop waits so long for the last one."""


class SideProcess(Protocol):
    """What `run` runs; it is made on the event loop."""

    @property
    def waits_for(self) -> str | None:
        """Why it does not do all of its work now; Degraded where it does, and something is wrong all the same."""
        ...

    @property
    def oldest_ms(self) -> int | None:
        """When the oldest piece of its work came; None if nothing waits, or if that is not known."""
        ...

    @property
    def registry(self) -> CollectorRegistry:
        """Of its metrics."""
        ...

    def start(self) -> None: ...
    async def stop(self) -> None:
        """In order; also when it was not started."""
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


class Status:
    """Of a process: starting until it was ready once, unless it waits for what somebody must mend."""

    def __init__(self) -> None:
        self._was_ready = self.draining = False

    def by(self, reason: str | None) -> str:
        """`reason`: why it does not do all of its work now."""
        works = reason is None or isinstance(reason, Degraded)
        self._was_ready |= works
        if self.draining:
            return "draining"
        if isinstance(reason, Starting) and not self._was_ready:
            return "starting"
        return "ready" if reason is None else "degraded" if works else "unavailable"


class Reports:
    """What a process reports of itself on the worker topic, by a producer of its own: it goes on during the stop."""

    def __init__(
        self, name: str, health: HealthAddress, kafka: KafkaSettings, codecs: Codecs, certificates: Certificates
    ) -> None:
        self._certificates = certificates
        self._transport = Transport(kafka, delivery_timeout_s=DELIVERY_S)
        address = health.health_host, health.health_port
        self._reporter = Reporter(name, address, self._transport, kafka.names, codecs.blocking, self._look)
        self._process: SideProcess | None = None
        self.status = Status()

    def start(self, process: SideProcess) -> None:
        self._process = process
        self._reporter.start()

    async def stop(self, *, in_order: bool) -> None:
        await self._reporter.stop(in_order=in_order)
        await asyncio.to_thread(self._transport.close, FLUSH_S)

    def _look(self) -> dict[str, Any]:
        assert self._process is not None, "it reports once it has started"
        reason = self._process.waits_for
        return {
            "status": self.status.by(reason),
            "reason": reason,
            "oldest_waiting_at": self._process.oldest_ms,
            "expiring_certificates": self._certificates.expiring(),
        }


async def run(
    name: str,
    health: HealthAddress,
    registry: RegistrySection,
    kafka: KafkaSettings,
    make: Callable[[Over, Codecs], Awaitable[SideProcess]],
) -> int:
    """Run until SIGTERM, SIGINT or `Over.fail`; the exit code. An error of the configuration is logged in one line.

    `name` is that of its section of the settings, and of its log events.
    """
    over = Over(name)
    certificates = Certificates(kafka, registry.access)
    process: SideProcess | None = None
    step = f"the schema registry at {without_user(registry.url or '')}"

    async def made() -> tuple[SideProcess, Reports]:
        nonlocal step
        codecs = await in_daemon_thread(partial(registry_codecs, registry.access, write=registry.write))
        step = "its files to be opened"
        return await make(over, codecs), Reports(name, health, kafka, codecs, certificates)

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
            process, reports = making.result()
        except PenstockError as error:
            logger.error("%s.cannot_start %s", name, error)
            return EXIT_FAILED
        process.registry.register(certificates)
        serving = HealthServer(health.health_host, health.health_port, lambda: process.waits_for, process.registry)
        try:
            serving.start()
            process.start()
            reports.start(process)
            return await over.code
        except OSError as error:
            where = f"{health.health_host}:{health.health_port}"
            logger.error(
                "%s.cannot_start %s cannot be bound (%s); set %s.health_port", name, where, error.strerror, name
            )
            return EXIT_FAILED
        finally:
            bound.begin()
            reports.status.draining = True
            await process.stop()
            await serving.stop()
            await reports.stop(in_order=over.code.done() and over.code.result() == EXIT_OK)
