"""Topics that a client may not read: named while it waits, and asked about until the right is granted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from confluent_kafka import KafkaError

from penstock.common import admin
from penstock.common.kafka_errors import missing_right
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_S = 5.0


class ReadRights:
    """For any thread.

    librdkafka reports a refused topic once, and nothing when it reads it again to the end that was reported before.
    """

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._refused: dict[str, str] = {}
        self._look_at = 0.0

    @property
    def topics(self) -> set[str]:
        return set(self._refused)

    @property
    def reason(self) -> str | None:
        """What must be granted; None while nothing is missing."""
        return "; ".join(list(self._refused.values())) or None

    def note(self, error: KafkaError, topic: str | None) -> bool:
        """Whether the error says that this topic may not be read."""
        if error.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED or topic is None:
            return False
        if topic not in self._refused:
            self._refused[topic] = missing_right(error, None, topic) or ""
            self._look_at = time.monotonic() + LOOK_S
            logger.error("read.refused topic=%s reason=%s", topic, self._refused[topic])
        return True

    def granted(self, topics: Iterable[str]) -> None:
        """They can be read, as one of their records shows."""
        for topic in topics:
            if self._refused.pop(topic, None) is not None:
                logger.warning("read.granted topic=%s", topic)

    def look(self) -> None:
        """Ask Kafka about the refused topics, every `LOOK_S`. Blocks for a moment."""
        if not self._refused or time.monotonic() < self._look_at:
            return
        asked = self.topics  # others may be refused meanwhile
        try:
            lacking = admin.lacking(self._kafka, dict.fromkeys(asked, "READ"))
        except PenstockError as error:
            logger.info("read.rights_unknown error=%s", error)
        else:
            self.granted(asked - lacking)
        self._look_at = time.monotonic() + LOOK_S
