"""Group clients that have lost the cluster for good, and how to know them.

A single broker that stood still says for a moment that its cluster has no brokers. librdkafka then forgets the only one
that it knows, and a member of a group may never look for it again (librdkafka's issue 5511): it is told nothing more,
and no error. Clients outside of groups were never seen so.
"""

from __future__ import annotations

import logging
import threading
import time

from confluent_kafka import Consumer, KafkaException

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_EACH_S = 3.0
LOOK_S = 1.0


class LostBrokers:
    """Looks after the client of a member. Belongs to the thread that polls it."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._looked_at = time.monotonic()

    def replaces(self, consumer: Consumer, *, is_member: bool) -> bool:
        """Whether a new client should take the place of this one: it hears of no broker, and others do.

        Asks every `LOOK_EACH_S` while the client has no partitions; then it blocks for up to three times `LOOK_S`.
        """
        now = time.monotonic()
        if is_member:
            self._looked_at = now
        if now - self._looked_at < LOOK_EACH_S:
            return False
        lost = not self._hears(consumer) and self._others_hear()
        self._looked_at = time.monotonic()
        if lost:
            logger.warning("group.brokers_lost topic=%s: joining with a new client", self._topic)
        return lost

    def _hears(self, consumer: Consumer) -> bool:
        try:
            consumer.list_topics(self._topic, timeout=LOOK_S)
        except KafkaException:
            return False
        return True

    def _others_hear(self) -> bool:
        try:
            admin.partition_counts(self._settings, [self._topic], 2 * LOOK_S)
        except PenstockError:
            return False
        return True


def let_go(consumer: Consumer) -> None:
    """Close a client that was replaced. Its end may wait for answers that do not come."""
    threading.Thread(target=consumer.close, name="replaced consumer", daemon=True).start()
