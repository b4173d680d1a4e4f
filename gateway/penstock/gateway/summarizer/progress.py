"""How far each conversation is summed up, as positions that a consumer group has committed. All methods block."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from penstock.common import admin
from penstock.common.group_names import group_name
from penstock.common.group_positions import GroupPositions, Kept
from penstock.common.reader import make_consumer
from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer.summary_scheduler import Commit, Key

TIMEOUT_S = 10.0
GROUP = "penstock-summarizer"


class CommittedPositions:
    """With each position goes what else a `Commit` says. Several summarizers may commit for one group."""

    def __init__(self, kafka: KafkaSettings, group_id: str | None) -> None:
        self._kafka, self._group_id = kafka, group_id
        self._positions: GroupPositions | None = None
        self._lock = threading.Lock()
        """librdkafka's consumers are not to be closed while they are asked."""

    def check(self) -> None:
        """Ask for the group. Raises Forbidden, naming the group and the right, and BrokerUnavailable."""
        with self._lock:
            group = self._of_group().group
        admin.check_group(self._kafka, group)

    def read(self, topic_ids: Mapping[str, str], keys: Mapping[str, Key]) -> dict[str, Commit]:
        """By topic, what is committed of the topic with this Kafka id. Raises BrokerUnavailable."""
        with self._lock:
            found = self._of_group().read(list(topic_ids))
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
            self._of_group().keep(
                {
                    topic: Kept(offset=one.offset, topic_id=topic_id, note=f"{one.base} {one.failed}")
                    for topic, (topic_id, one) in commits.items()
                }
            )

    def close(self) -> None:
        with self._lock:
            if self._positions is not None:
                self._positions.consumer.close()

    def _of_group(self) -> GroupPositions:
        """The group is named when it is first needed; under the lock."""
        if self._positions is None:
            group = group_name(self._kafka, self._group_id, GROUP, list(admin.conversation_topics(self._kafka)))
            consumer = make_consumer(self._kafka, overrides={"group.id": group})
            self._positions = GroupPositions(group=group, consumer=consumer, timeout_s=TIMEOUT_S)
        return self._positions
