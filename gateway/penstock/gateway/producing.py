"""The producer of a service. A right that it lacks is its operator's affair: callers wait until it is granted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.common import admin
from penstock.common.kafka_errors import unavailable
from penstock.common.settings import KafkaSettings
from penstock.common.threads import in_daemon_thread
from penstock.common.transport import AsyncTransport, Delivery
from penstock.gateway.service.dependencies import Probe, Problem
from penstock.schemas.errors import BrokerUnavailable, Forbidden

logger = logging.getLogger(__name__)


class ServiceTransport(AsyncTransport):
    """Raises BrokerUnavailable in place of Forbidden, and remembers the topics that this client may not write to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.refused: dict[str, str] = {}
        """By topic, what Kafka said."""
        self.on_refused: Callable[[], None] = lambda: None

    def produce_nowait(self, topic: str, *args: Any, callback: Any = None, **options: Any) -> None:
        def delivered(delivery: Delivery) -> None:
            if isinstance(delivery.error, Forbidden):
                delivery = replace(delivery, error=self._unavailable(topic, delivery.error))
            elif delivery.error is None:
                self.granted(topic)
            if callback is not None:
                callback(delivery)

        try:
            super().produce_nowait(topic, *args, callback=delivered, **options)
        except Forbidden as error:
            raise self._unavailable(topic, error) from error

    def granted(self, topic: str) -> None:
        """It may be written to."""
        if self.refused.pop(topic, None) is not None:
            logger.warning("produce.granted topic=%s", topic)

    def _unavailable(self, topic: str, error: Forbidden) -> BrokerUnavailable:
        if topic not in self.refused:
            logger.error("produce.refused topic=%s error=%s", topic, error)
            self.refused[topic] = error.message
            self.on_refused()
        return unavailable(error)


def rights_probe(transport: ServiceTransport, kafka: KafkaSettings) -> Probe:
    """Asks Kafka about the topics that refused a record: the right may be granted while no record comes."""

    async def probe() -> Problem | None:
        if not transport.refused:
            return None
        asked = dict.fromkeys(transport.refused, "WRITE")  # others may refuse meanwhile
        lacking = await in_daemon_thread(admin.lacking, kafka, asked)
        for topic in asked.keys() - lacking:
            transport.granted(topic)
        return (
            None
            if not transport.refused
            else Problem("Kafka refuses records of this gateway", "; ".join(transport.refused.values()))
        )

    return probe
