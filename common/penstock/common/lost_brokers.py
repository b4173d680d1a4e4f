"""Group clients that have lost the cluster for good, and how to know them.

A single broker that stood still says for a moment that its cluster has no brokers. librdkafka then forgets the only one
that it knows, and a member of a group may never look for it again (librdkafka's issue 5511): it hears nothing more,
and no error. Clients outside of groups were never seen so.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

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
        self._asking: threading.Thread | None = None
        self._heard()

    def _heard(self) -> None:
        self._each_s = LOOK_EACH_S
        self._looked_at = time.monotonic()
        self._others_hear = threading.Event()
        """Kafka has answered another client since this one was seen without a broker."""

    def replaces(self, consumer: Consumer, *, busy: bool = False) -> bool:
        """Whether a new client should take the place of this one: two looks in a row it knew no broker, others did.

        Looks every `LOOK_EACH_S` unless the client is `busy`, which says that it is well; a look blocks for up to
        `LOOK_S`. After each replacement it looks half as often, until a client hears of a broker: one whose connections
        take long must have the time to join.
        """
        if busy:
            self._heard()
        if time.monotonic() - self._looked_at < self._each_s:
            return False
        if self._hears(consumer):
            self._heard()
            return False
        self._looked_at = time.monotonic()
        if not self._others_hear.is_set():
            self._ask_others()
            return False
        self._others_hear = threading.Event()
        self._each_s = min(2 * self._each_s, LOOK_SELDOM_S)
        logger.warning("group.brokers_lost topic=%s: joining with a new client", self._topic)
        return True

    def _hears(self, consumer: Consumer) -> bool:
        try:
            consumer.list_topics(self._topic, timeout=LOOK_S)
        except KafkaException as error:
            return error.args[0].code() != _NO_BROKER
        return True

    def _ask_others(self) -> None:
        """In a thread of its own: while Kafka is away it waits, and the client must be polled once it is back."""
        if self._asking is not None and self._asking.is_alive():
            return
        hear = self._others_hear  # an answer that comes late counts for nothing

        def ask() -> None:
            with suppress(PenstockError):
                admin.partition_counts(self._settings, [self._topic], LOOK_S)
                hear.set()

        self._asking = threading.Thread(target=ask, name="lost brokers", daemon=True)
        self._asking.start()


def let_go(consumer: Consumer) -> None:
    """Close a client that was replaced. Its end may wait for answers that do not come."""
    threading.Thread(target=consumer.close, name="replaced consumer", daemon=True).start()
