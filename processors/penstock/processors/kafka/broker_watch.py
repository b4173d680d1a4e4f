"""Whether Kafka answers: one watch for the whole worker wakes all who wait for Kafka at once.

Every client reports to the watch what it sees. While somebody waits, and only then, a small metadata request asks as
well: it returns a few milliseconds after Kafka is there again. All methods but `answered` belong to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from penstock.common.background import BackgroundTasks
from penstock.common.kafka_errors import client_logger
from penstock.common.settings import KafkaSettings

logger = logging.getLogger(__name__)

PROBE_S = 1.0
"""How long one probe waits for Kafka."""
PAUSE_S = 0.1
"""Between two probes, so that a partition without a leader beside a Kafka that answers costs little."""

NEW_CLIENT_AFTER = 3
"""Probes without an answer before a new client is made."""

Probe = Callable[[float], bool]
"""Ask Kafka, blocking for at most so many seconds: whether it answered."""


class BrokerWatch:
    """`away` is what the last sign says; `wait` returns at the next sign that Kafka answers."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broker-watch")
        self._waiters: set[asyncio.Future[bool]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()
        self._away_since: float | None = None
        self._closed = False

    @property
    def away(self) -> bool:
        """Kafka was asked and did not answer. Who has something for Kafka should wait first."""
        return self._away_since is not None

    def answered(self) -> None:
        """A client got an answer from Kafka. For any thread; costs nothing while nobody waits."""
        if self._waiters or self.away:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                logger.debug("broker_watch.loop_closed")

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a sign that Kafka answers; False when there was none in time."""
        if self._closed:
            return False
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiters.add(waiter)
        if self._probing is None:
            self._probing = self._tasks.start(self._probe_while_somebody_waits(), "broker watch")
        try:
            await asyncio.wait({waiter}, timeout=timeout_s)
            return waiter.done()
        finally:
            self._waiters.discard(waiter)

    def close(self) -> None:
        """Let all who wait go."""
        self._closed = True
        self._wake()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _probe_while_somebody_waits(self) -> None:
        try:
            while True:
                await asyncio.sleep(PAUSE_S)
                if not self._waiters or self._closed:
                    return
                if await self._kafka_answers():
                    self._wake()
                elif self._away_since is None:
                    self._away_since = time.monotonic()
                    logger.warning("broker.away")
        finally:
            self._probing = None

    async def _kafka_answers(self) -> bool:
        try:
            return await self._loop.run_in_executor(self._thread, self._probe, PROBE_S)
        except Exception:  # no probe may end the watching: those who wait would never hear of Kafka again
            logger.debug("broker_watch.probe_failed", exc_info=True)
            return False

    def _wake(self) -> None:
        if self._away_since is not None:
            logger.warning(
                "broker.back away_s=%.1f waiting=%d", time.monotonic() - self._away_since, len(self._waiters)
            )
            self._away_since = None
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)


def metadata_probe(settings: KafkaSettings) -> Probe:
    """Asks for the metadata of one topic, with a client of its own that connects again sooner than the others."""
    config = settings.librdkafka() | {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
    del config["allow.auto.create.topics"]  # a consumer's property
    client: AdminClient | None = None
    failures = 0

    def probe(timeout_s: float) -> bool:
        nonlocal client, failures
        if client is None:
            client = AdminClient(config, logger=client_logger)
        try:
            there = bool(client.list_topics(settings.names.control, timeout=timeout_s).brokers)
        except KafkaException:
            there = False
        failures = 0 if there else failures + 1
        if failures and failures % NEW_CLIENT_AFTER == 0:
            client = None  # one that lost its broker can stay without any connection for a minute and more
        return there

    return probe
