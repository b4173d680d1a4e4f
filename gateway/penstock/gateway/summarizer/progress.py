"""How far each conversation is summed up, as positions that a consumer group has committed. All methods block."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from penstock.common.group_positions import GroupPositions, Kept
from penstock.common.reader import make_consumer
from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer.desk import Commit, Key

TIMEOUT_S = 10.0


class Progress:
    """With each position goes what else a `Commit` says. Several summarizers may commit for one group."""

    def __init__(self, kafka: KafkaSettings, group_id: str) -> None:
        self._consumer = make_consumer(kafka, overrides={"group.id": group_id})
        self._positions = GroupPositions(group=group_id, consumer=self._consumer, timeout_s=TIMEOUT_S)
        self._lock = threading.Lock()
        """librdkafka's consumers are not to be closed while they are asked."""

    def read(self, topic_ids: Mapping[str, str], keys: Mapping[str, Key]) -> dict[str, Commit]:
        """By topic, what is committed of the topic with this Kafka id. Raises BrokerUnavailable."""
        with self._lock:
            found = self._positions.read(list(topic_ids))
        committed: dict[str, Commit] = {}
        for topic, kept in found.items():
            match kept.note.split():
                case [base, failed] if kept.topic_id == topic_ids[topic]:
                    committed[topic] = Commit(keys[topic], kept.offset, int(base), int(failed))
                case _:
                    continue
        return committed

    def commit(self, commits: Mapping[str, tuple[str, Commit]]) -> None:
        """By topic, its Kafka id and what to commit. Raises BrokerUnavailable."""
        with self._lock:
            self._positions.keep(
                {
                    topic: Kept(offset=one.offset, topic_id=topic_id, note=f"{one.base} {one.failed}")
                    for topic, (topic_id, one) in commits.items()
                }
            )

    def close(self) -> None:
        with self._lock:
            self._consumer.close()
