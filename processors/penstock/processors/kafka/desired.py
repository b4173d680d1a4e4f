"""Following `inference.desired`: what operators ordered of models and classes.

The follower connects the topic, which a worker replays before it admits work, to the part that carries orders out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.common.desired import WITHDRAWN, DesiredRecord, read_record
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.record_follower import RecordFollower
from penstock.schemas.codec import Codec


class DesiredFollower(RecordFollower[DesiredRecord]):
    """Follows the topic from its start; `on_records` runs on the event loop, in log order.

    `on_topic` gets Kafka's id of a topic before its first record, also of one that was made anew.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        on_records: Callable[[Sequence[DesiredRecord]], None],
        on_topic: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        super().__init__(
            settings,
            settings.names.desired,
            lambda message: read_record(message, codec),
            loop,
            on_records,
            name="desired",
        )
        self._on_topic = on_topic

    def topic_begins(self, topic_id: str | None) -> None:
        self._on_topic(topic_id)

    def key_of(self, record: DesiredRecord) -> str:
        return record.key

    def withdrawals(self, keys: Sequence[str]) -> list[DesiredRecord]:
        return [DesiredRecord(key, None, WITHDRAWN) for key in keys]
