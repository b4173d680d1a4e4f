"""Conversations with a topic each: made within the limit of the cluster, removed for good, asked for their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.common import admin
from penstock.gateway.conversations.layout import Target
from penstock.gateway.conversations.log import KafkaLog
from penstock.gateway.conversations.tails import TopicEnd
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable, InsufficientCapacity, NotFound

GONE_S = 10.0
"""A broker knows of a topic's deletion some milliseconds after it."""
TRIES = 3


class OwnTopics:
    """A `Layout`."""

    is_shared = False

    def __init__(self, settings: GatewaySettings) -> None:
        self._kafka = settings.kafka_settings()
        self._most = settings.conversations.max_topics
        self._durability = settings.topics.durability
        self.log = KafkaLog(self._kafka)

    def target(self, topic: str, key: bytes) -> Target:
        return Target(topic, 0, key)

    def create(self, topic: str) -> None:
        if admin.topic_id(self._kafka, topic) is None:
            count = admin.count_conversations(self._kafka)
            if count >= self._most:
                raise InsufficientCapacity(
                    f"there are {count} conversations; {self._most} are allowed",
                    details={"need": count + 1, "capacity": self._most},
                )
            admin.create_conversation_topic(self._kafka, topic, durability=self._durability)

    def remove(self, topic: str, place: TopicEnd | None = None) -> bool:
        found = admin.topic_id(self._kafka, topic)
        if place is not None:
            if found != place.topic_id:
                return True
            if admin.end_offsets(self._kafka, [(topic, 0)])[topic, 0] != place.end:
                return False
        admin.delete_topic(self._kafka, topic)
        give_up = time.monotonic() + GONE_S
        while found is not None and admin.topic_id(self._kafka, topic) == found:
            if time.monotonic() > give_up:
                raise BrokerUnavailable(f"{topic} is still there; delete the conversation again", retry_after_s=1)
            time.sleep(0.01)
        return True

    def ids(self, tenant: str) -> list[str]:
        return [name for owner, name in self.everyone() if owner == tenant]

    def everyone(self) -> list[tuple[str, str]]:
        return list(admin.conversation_topics(self._kafka).values())

    def topic_ids(self, topics: Sequence[str]) -> dict[str, str]:
        return admin.topic_ids(self._kafka, topics)

    def newest_times(self, topics: Sequence[str]) -> dict[str, int]:
        with suppress(NotFound):  # one was deleted meanwhile
            return admin.newest_times(self._kafka, topics)
        return {}

    def times_of(self, wants: Callable[[str], bool]) -> dict[tuple[str, str], int | None]:
        keys = {topic: key for topic, key in admin.conversation_topics(self._kafka).items() if wants(key[0])}
        found: dict[tuple[str, str], int | None] = {}
        for group in admin.in_groups(list(keys)):
            found |= {keys[topic]: time_ms for topic, time_ms in self._newest_of(group).items()}
        return found

    def take_back(self, before_ms: int) -> int:
        return 0  # a topic holds what stands in it

    def close(self) -> None:
        self.log.close()

    def _newest_of(self, topics: Sequence[str]) -> dict[str, int | None]:
        """Those that are deleted meanwhile are left out."""
        for _ in range(TRIES):
            try:
                times = admin.newest_times(self._kafka, topics)
            except NotFound:
                topics = list(admin.topic_ids(self._kafka, topics))
            else:
                return {topic: times.get(topic) for topic in topics}
        raise BrokerUnavailable("conversations are deleted while they are listed; try again", retry_after_s=1)
