"""Group clients that have lost the cluster for good, and how to know them.

A single broker that stood still says for a moment that its cluster has no brokers. librdkafka then forgets the only one
that it knows, and a member of a group may never look for it again (librdkafka's issue 5511): it is told nothing more,
and no error. Clients outside of groups were never seen so.
"""

from __future__ import annotations

import logging
import threading
import time

from confluent_kafka import Consumer, KafkaError, KafkaException

from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_EACH_S, LOOK_SELDOM_S = 2.0, 60.0
LOOK_S = 1.0

_NO_BROKER = KafkaError._TRANSPORT  # pyright: ignore[reportPrivateUsage]
"""What librdkafka says when it has no broker to ask; of one that is slow it says that the time is over."""


class LostBrokers:
    """Looks after the client of a member. Belongs to the thread that polls it."""

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._settings = settings
        self._topic = topic
        self._heard()

    def _heard(self) -> None:
        self._each_s = LOOK_EACH_S
        self._missed = False
        self._looked_at = time.monotonic()

    def replaces(self, consumer: Consumer, *, busy: bool = False) -> bool:
        """Whether a new client should take the place of this one: two looks in a row it knew no broker, others did.

        Looks every `LOOK_EACH_S` unless the client is `busy`, which says that it is well; a look blocks for up to four
        times `LOOK_S`. After each replacement it looks half as often, until a client hears of a broker: one whose
        connections take long must have the time to join.
        """
        if busy:
            self._heard()
        if time.monotonic() - self._looked_at < self._each_s:
            return False
        if self._hears(consumer):
            self._heard()
            return False
        missed = self._others_hear()
        lost, self._missed = missed and self._missed, missed
        self._looked_at = time.monotonic()
        if lost:
            self._missed = False
            self._each_s = min(2 * self._each_s, LOOK_SELDOM_S)
            logger.warning("group.brokers_lost topic=%s: joining with a new client", self._topic)
        return lost

    def _hears(self, consumer: Consumer) -> bool:
        try:
            consumer.list_topics(self._topic, timeout=LOOK_S)
        except KafkaException as error:
            return error.args[0].code() != _NO_BROKER
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
