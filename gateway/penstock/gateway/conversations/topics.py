"""Topics of conversations: made within the limit of the cluster, removed for good, and when each was written to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.common import admin
from penstock.gateway.conversations.tails import Place
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable, InsufficientCapacity, NotFound

TRIES = 3
GONE_S = 10.0
"""A broker knows of a topic's deletion some milliseconds after it."""


@dataclass(frozen=True, slots=True)
class ConversationTopics:
    """All methods block, and raise BrokerUnavailable."""

    settings: GatewaySettings

    def create(self, topic: str) -> None:
        """Make the topic unless it is there. Raises InsufficientCapacity."""
        kafka, limit = self.settings.kafka_settings(), self.settings.conversations.max_topics
        if admin.topic_id(kafka, topic) is None:
            count = admin.count_conversations(kafka)
            if count >= limit:
                raise InsufficientCapacity(
                    f"there are {count} conversations; {limit} are allowed",
                    details={"need": count + 1, "capacity": limit},
                )
            admin.create_conversation_topic(kafka, topic, durability=self.settings.topics.durability)

    def remove(self, topic: str, place: Place | None = None) -> bool:
        """Delete the topic and wait until a broker says that it is gone: the next turn must not find it.

        False when it is still there and does not end at `place` any more. One of another id is left alone: another
        gateway has removed this one, and a turn made it anew.
        """
        kafka = self.settings.kafka_settings()
        found = admin.topic_id(kafka, topic)
        if place is not None:
            if found != place.topic_id:
                return True
            if admin.end_offsets(kafka, [(topic, 0)])[topic, 0] != place.end:
                return False
        admin.delete_topic(kafka, topic)
        give_up = time.monotonic() + GONE_S
        while found is not None and admin.topic_id(kafka, topic) == found:
            if time.monotonic() > give_up:
                raise BrokerUnavailable(f"{topic} is still there; delete the conversation again", retry_after_s=1)
            time.sleep(0.01)
        return True

    def newest_times(self, wants: Callable[[str], bool]) -> dict[tuple[str, str], int | None]:
        """By tenant and id, of all conversations of the tenants that are wanted: when the newest record was written, in
        ms since the epoch; None without records."""
        kafka = self.settings.kafka_settings()
        parse = kafka.names.parse_conversation
        keys = {topic: key for topic in admin.partition_counts(kafka) if (key := parse(topic)) is not None}
        topics = [topic for topic, key in keys.items() if wants(key[0])]
        found: dict[tuple[str, str], int | None] = {}
        for group in admin.in_groups(topics):
            found |= {keys[topic]: time_ms for topic, time_ms in self._newest_of(group).items()}
        return found

    def _newest_of(self, topics: Sequence[str]) -> dict[str, int | None]:
        """Those that are deleted meanwhile are left out."""
        kafka = self.settings.kafka_settings()
        for _ in range(TRIES):
            try:
                times = admin.newest_times(kafka, topics)
            except NotFound:
                topics = list(admin.topic_ids(kafka, topics))
            else:
                return {topic: times.get(topic) for topic in topics}
        raise BrokerUnavailable("conversations are deleted while they are listed; try again", retry_after_s=1)

    def topic_ids(self, tenant: str, conversation_ids: Sequence[str]) -> dict[str, str]:
        """By id of those conversations that exist: Kafka's id of the topic."""
        kafka = self.settings.kafka_settings()
        topics = {kafka.names.conversation(tenant, one): one for one in conversation_ids}
        return {topics[topic]: topic_id for topic, topic_id in admin.topic_ids(kafka, list(topics)).items()}
