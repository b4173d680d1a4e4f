"""The composition root of `penstock webhooks`: makes the parts, sends until a signal to stop, and stops in order."""

from __future__ import annotations

import asyncio
import logging
import sys

from penstock.common import admin
from penstock.common.background import BackgroundTasks
from penstock.common.deliveries import read_deliveries
from penstock.common.group_consumer import GroupConsumer, Listener
from penstock.common.log_records import LogRecords
from penstock.common.telemetry import register, tracing
from penstock.common.transport import Transport
from penstock.gateway.callbacks import Callbacks
from penstock.gateway.producing import ServiceTransport
from penstock.gateway.side_process import EXIT_USAGE, Over, run
from penstock.gateway.webhooks.deliveries import Key
from penstock.gateway.webhooks.dispatcher import Dispatcher, Tools
from penstock.gateway.webhooks.metrics import WebhookMetrics
from penstock.gateway.webhooks.records import Erasures
from penstock.gateway.webhooks.sender import Sender
from penstock.gateway.webhooks.settings import WebhooksSettings
from penstock.gateway.webhooks.status_calls import StatusCalls
from penstock.schemas.errors import PenstockError
from penstock.schemas.registry import Codecs

logger = logging.getLogger(__name__)

DELIVERY_S = 10.0
FLUSH_S = 5.0
ASK_S, AGAIN_S = 10.0, 1.0
LOAD_S = 120.0
GROUP, STATUSES = "penstock-webhooks", "-statuses"


async def run_webhooks(settings: WebhooksSettings) -> int:
    """Send webhooks until SIGTERM or SIGINT; the process's exit code."""
    if settings.webhooks.secret is None and not settings.webhooks.secrets:
        print("penstock webhooks: nothing signs the calls: set webhooks.secret", file=sys.stderr, flush=True)
        return EXIT_USAGE

    async def make(over: Over, codecs: Codecs) -> WebhookProcess:
        return WebhookProcess(settings, over, codecs)

    with tracing(settings.telemetry, "webhooks"):
        return await run("webhooks", settings.webhooks, settings.schema_registry, settings.kafka_settings(), make)


class WebhookProcess:
    """One sender of webhooks. Raises PenstockError for what it cannot be made of."""

    def __init__(self, settings: WebhooksSettings, over: Over, codecs: Codecs) -> None:
        self._over = over
        self._kafka = kafka = settings.kafka_settings()
        section = settings.webhooks
        callbacks, metrics = Callbacks(section), WebhookMetrics()
        self.registry = metrics.registry
        register(self.registry)
        self._transport = Transport(kafka, delivery_timeout_s=DELIVERY_S)
        self._records = LogRecords(kafka)
        self._sender = Sender(callbacks, section.timeout_s)
        tools = Tools(
            kafka=kafka,
            codec=codecs.blocking,
            prompt=codecs.prompt,
            transport=ServiceTransport(self._transport),
            records=self._records,
            sender=self._sender,
            callbacks=callbacks,
            metrics=metrics,
            consumer=lambda listener: self._consumer(kafka.names.result, section.group_id, listener, GROUP),
            load=lambda partitions: read_deliveries(kafka, codecs.blocking, partitions, LOAD_S),
        )
        self._dispatcher = Dispatcher(tools, section)
        group = None if section.group_id is None else section.group_id + STATUSES
        self._statuses = StatusCalls(
            tools, section, lambda listener: self._consumer(kafka.names.status, group, listener, GROUP + STATUSES)
        )
        self._erasures = Erasures(kafka, codecs.blocking, self._erased)
        self._background = BackgroundTasks()

    def _consumer(self, topic: str, group: str | None, listener: Listener, base: str) -> GroupConsumer:
        return GroupConsumer(self._kafka, [topic], group, listener, base=base)

    @property
    def waits_for(self) -> str | None:
        parts = (self._erasures, self._dispatcher.work, self._statuses.work)
        return next((part.waits_for for part in parts if part.waits_for is not None), None)

    @property
    def oldest_ms(self) -> int | None:
        return self._dispatcher.oldest_ms()

    def start(self) -> None:
        self._background.start(self._run(), "webhooks")

    async def stop(self) -> None:
        """In this order, so that the next owner finds all that became of webhooks here."""
        # 1. Nothing new is begun, and open calls are broken off.
        await self._background.cancel()
        await asyncio.gather(self._dispatcher.cancel(), self._statuses.cancel())
        self._sender.close()
        # 2. What is on its way to the delivery topic is acknowledged.
        await asyncio.to_thread(self._transport.close, FLUSH_S)
        # 3. Only then others get the partitions.
        await asyncio.gather(self._dispatcher.work.leave(), self._statuses.work.leave())
        await self._records.stop()
        await asyncio.to_thread(self._erasures.stop)
        logger.info("webhooks.stopped")

    async def _run(self) -> None:
        """Begin when the topics are there, and say when it is over."""
        while (reason := await self._cannot_begin()) is not None:
            if reason != self._dispatcher.work.waits_for:
                logger.error("webhooks.waiting reason=%s", reason)
                self._dispatcher.work.reason = reason
            await asyncio.sleep(AGAIN_S)
        for work in (self._dispatcher.work, self._statuses.work):
            work.over.add_done_callback(lambda over: self._over.fail(over.result()))
            work.start()
        logger.info("webhooks.started")
        while self._erasures.failure is None:
            await asyncio.sleep(AGAIN_S)
        # Calls would be made for what is erased from now on.
        self._over.fail(f"erasures are not followed: {self._erasures.failure!r}")

    async def _cannot_begin(self) -> str | None:
        names = self._kafka.names
        try:
            counts = await asyncio.to_thread(admin.partition_counts, self._kafka, None, ASK_S)
            needed = (names.result, names.status, names.delivery, names.control, names.dlq)
            missing = [one for one in needed if one not in counts]
            if missing:
                return f"missing topics: {', '.join(missing)}; create them with `penstock topics create`"
            if counts[names.delivery] < counts[names.result]:
                return f"{names.delivery} has fewer partitions than {names.result}: add partitions to it"
            await asyncio.to_thread(self._erasures.start)
        except PenstockError as error:
            return str(error)
        return None

    def _erased(self, key: Key, at_ms: int) -> None:
        self._dispatcher.erased(key, at_ms)
        self._statuses.erased(key)
