"""Topics of conversations: made within the limit of the cluster, removed for good."""

from __future__ import annotations

import time
from dataclasses import dataclass

from penstock.common import admin
from penstock.gateway.conversations.tails import Place
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable, InsufficientCapacity

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
