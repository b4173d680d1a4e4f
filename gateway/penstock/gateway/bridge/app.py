"""The bridge's composition root: makes the parts, reads the queues until a signal to stop, and stops in order."""

from __future__ import annotations

import asyncio
import logging
import sys

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.configured import open_store
from penstock.common.telemetry import register, tracing
from penstock.common.threads import in_daemon_thread
from penstock.common.transport import Transport
from penstock.gateway.bridge.feeder import QueueFeeder
from penstock.gateway.bridge.known import Known
from penstock.gateway.bridge.message_handler import MessageHandler, StoreReads
from penstock.gateway.bridge.requests import Requests
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.settings import tenant_limits
from penstock.gateway.producing import ServiceTransport
from penstock.gateway.side_process import EXIT_USAGE, Over, run
from penstock.producers import AsyncClient
from penstock.schemas.errors import PenstockError
from penstock.schemas.registry import Codecs
from penstock.schemas.requests import prepare_validation

logger = logging.getLogger(__name__)

# Gauges of the times at which counters began: nobody reads them, and they double the series.
disable_created_metrics()


class BridgeMetrics:
    """One per bridge, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._messages = Counter(
            "penstock_queue_messages",
            "Messages of [[queues]] by what became of them here.",
            ["topic", "outcome"],
            registry=self.registry,
        )
        self._waiting = Gauge(
            "penstock_queue_waiting", "Messages of [[queues]] read and not begun.", ["topic"], registry=self.registry
        )

    def on_message(self, topic: str, outcome: str) -> None:
        """Count what became of a message of a queue: completed, refused, dead_lettered, ignored or tried_again."""
        self._messages.labels(topic=topic, outcome=outcome).inc()

    def on_waiting(self, topic: str, count: int) -> None:
        """So many messages of a queue were read here and wait for room in its window."""
        self._waiting.labels(topic=topic).set(count)


DELIVERY_S = 10.0
FLUSH_S = 5.0
MOST_FOLLOWS = 1_000_000
"""The book bounds what is under way."""


async def run_bridge(settings: BridgeSettings) -> int:
    """Read the queues until SIGTERM or SIGINT; the process's exit code. What a user can mend is printed in one line."""
    if not settings.queues:
        print(
            "penstock bridge: there are no [[queues]] to read: see docs/how-to/integrations.md",
            file=sys.stderr,
            flush=True,
        )
        return EXIT_USAGE
    prepare_validation()

    async def make(over: Over, codecs: Codecs) -> Bridge:
        store = await in_daemon_thread(open_store, settings.artifacts, settings.artifacts_location)
        return Bridge(settings, store, over, codecs)

    with tracing(settings.telemetry, "bridge"):
        return await run("bridge", settings.bridge, settings.schema_registry, settings.kafka_settings(), make)


class Bridge:
    """One bridge process. Raises PenstockError for what it cannot be made of."""

    def __init__(self, settings: BridgeSettings, store: ArtifactStore, over: Over, codecs: Codecs) -> None:
        kafka, metrics, codec = settings.kafka_settings(), BridgeMetrics(), codecs.blocking
        self.registry = metrics.registry
        register(self.registry)
        self._transport = Transport(kafka, delivery_timeout_s=DELIVERY_S)
        tenants = {queue.tenant for queue in settings.queues}
        self._clients = {
            tenant: AsyncClient(kafka, tenant=tenant, timeout_s=DELIVERY_S, codec=codec, max_follows=MOST_FOLLOWS)
            for tenant in tenants
        }
        allowances = _allowances(settings)
        self._known = Known(kafka, codec, settings.gateway.worker_late_s, allowances.order)
        self._known.declare(settings.models)
        requests = Requests(self._clients, self._known, allowances, store.check_place, kafka.names)
        sender = ServiceTransport(self._transport)
        self._feeder = QueueFeeder(
            settings.queues,
            settings.queue_policy,
            settings.queue_merge,
            kafka,
            self._known,
            MessageHandler(requests, sender, StoreReads(store), kafka, codec),
            counted=metrics.on_message,
            waiting=metrics.on_waiting,
            on_failure=over.fail,
        )

    oldest_ms = None

    @property
    def waits_for(self) -> str | None:
        return self._feeder.work.waits_for or self._known.lacks

    def start(self) -> None:
        self._feeder.start()
        logger.info("bridge.started tenants=%s", ",".join(sorted(self._clients)))

    async def stop(self) -> None:
        """In this order, so that the next owner finds all that was sent here."""
        # 1. Nothing new is begun.
        await self._feeder.cancel()
        # 2. Requests and answers that are on their way are acknowledged.
        await asyncio.to_thread(self._transport.close, FLUSH_S)
        for client in self._clients.values():
            try:
                await client.close(FLUSH_S)
            except PenstockError as error:
                logger.warning("bridge.not_delivered error=%s", error)
        # 3. Only then what is settled is committed, and others get the partitions.
        await self._feeder.work.leave()
        await self._known.stop()
        logger.info("bridge.stopped")


def _allowances(settings: BridgeSettings) -> Allowances:
    """The tenants' limits. What is counted of their work is what this bridge has under way."""
    defaults, by_tenant = tenant_limits(settings.gateway.limits, keyless=settings.auth.keys_file is None)
    return Allowances(defaults=defaults, by_tenant=by_tenant)
