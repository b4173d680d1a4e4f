"""How to reach Kafka: the one settings value that every Kafka client of Penstock is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.schemas.topics import TopicNames


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaSettings:
    """A cluster and the prefix of the topics in it.

    `security` takes librdkafka's names (security.protocol, sasl.mechanism, ssl.ca.location, …); its values may be
    secrets, so they are not in the repr. `max_record_bytes` bounds key, value and headers of one record together.
    """

    bootstrap_servers: str = "127.0.0.1:9092"
    topic_prefix: str = ""
    security: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    client_id: str = "penstock"
    max_record_bytes: int = 1_000_000

    @property
    def names(self) -> TopicNames:
        """The topic names under this prefix."""
        return TopicNames(self.topic_prefix)

    def librdkafka(self) -> dict[str, Any]:
        """What all librdkafka clients share; never creates a topic by naming it."""
        return {
            **self.security,
            "bootstrap.servers": self.bootstrap_servers,
            "client.id": self.client_id,
            "allow.auto.create.topics": False,
            # A broker that comes back is noticed within a second, not after the default of up to ten.
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
            "socket.connection.setup.timeout.ms": 5000,
            # After a broker that stood still a partition can be left without a leader in the client until the next full
            # look at the metadata, by default after five minutes.
            "topic.metadata.refresh.interval.ms": 10_000,
        }
