"""How far each conversation is summed up, as offsets that a consumer group has committed. All methods block."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.common.kafka_errors import from_kafka, translated
from penstock.common.reader import make_consumer
from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer.desk import Commit, Key

TIMEOUT_S = 10.0


class Progress:
    """Of topics with one partition. The offset goes with the topic's id, since one of a deleted topic counts for
    nothing, and with the other facts of a `Commit`.

    The group has no members: several summarizers may commit to it.
    """

    def __init__(self, kafka: KafkaSettings, group_id: str) -> None:
        self._consumer: Consumer = make_consumer(kafka, overrides={"group.id": group_id})
        self._lock = threading.Lock()
        """librdkafka's consumers are not to be closed while they are asked."""

    def read(self, topic_ids: Mapping[str, str], keys: Mapping[str, Key]) -> dict[str, Commit]:
        """By topic, what is committed of the topic with this Kafka id. Raises BrokerUnavailable."""
        with self._lock, translated("read what is summed up"):
            found = self._consumer.committed([TopicPartition(topic, 0) for topic in topic_ids], timeout=TIMEOUT_S)
        committed: dict[str, Commit] = {}
        for one in found:
            match (one.metadata or "").split():
                case [topic_id, base, failed] if one.error is None and topic_id == topic_ids[one.topic]:
                    if one.offset >= 0:
                        committed[one.topic] = Commit(keys[one.topic], one.offset, int(base), int(failed))
                case _:
                    continue
        return committed

    def commit(self, commits: Mapping[str, tuple[str, Commit]]) -> None:
        """By topic, its Kafka id and what to commit. Topics that are gone are passed over.

        Raises BrokerUnavailable.
        """
        due = [
            TopicPartition(topic, 0, one.offset, metadata=f"{topic_id} {one.base} {one.failed}")
            for topic, (topic_id, one) in commits.items()
        ]
        with self._lock, translated("commit what is summed up"):
            told = self._consumer.commit(offsets=due, asynchronous=False) or []
        for one in told:
            if one.error is not None and one.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise from_kafka(KafkaException(one.error), "commit what is summed up", one.topic)

    def close(self) -> None:
        with self._lock:
            self._consumer.close()
