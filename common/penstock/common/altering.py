"""Settings of topics that exist: setting them, and what durability needs of them. All functions block.

Every function raises BrokerUnavailable when Kafka does not answer within `timeout_s`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from penstock.common.admin import in_groups, partition_counts, topic_configs
from penstock.common.admin_clients import answer_of, asked
from penstock.common.kafka_errors import client_logger, translated
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import NotFound

GROUPS_TOPIC = "__consumer_offsets"
FLUSH = {"flush.messages": "1"}
"""What `durability = "fsync"` sets: every record is flushed before it is acknowledged."""


def alter_topics(settings: KafkaSettings, wanted: Mapping[str, Mapping[str, str]], timeout_s: float = 30.0) -> set[str]:
    """Set these settings of each topic, leave its others, and wait until they are visible.

    Returns the topics that exist. Raises Forbidden, BrokerUnavailable.
    """
    altered: set[str] = set()
    for names in in_groups(list(wanted)):
        resources = [_alteration(name, wanted[name]) for name in names]
        altered |= asked(settings, partial(_alter, resources), timeout_s, refused_too=True)
    give_up = time.monotonic() + timeout_s
    waited_for = set(altered)
    while waited_for and time.monotonic() < give_up:
        found = topic_configs(settings, list(waited_for), timeout_s)
        waited_for = {name for name in found if not wanted[name].items() <= found[name].items()}
        time.sleep(0.05 if waited_for else 0)
    return altered


def _alteration(topic: str, config: Mapping[str, str]) -> ConfigResource:
    entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in config.items()]
    return ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)


def _alter(resources: list[ConfigResource], client: AdminClient, wait_s: float) -> set[str]:
    altered: set[str] = set()
    with translated("set the settings of topics"):
        futures = client.incremental_alter_configs(resources, request_timeout=wait_s)
    for resource, future in futures.items():
        with suppress(NotFound):
            answer_of(future, f"set the settings of {resource.name}", wait_s, resource.name)
            altered.add(resource.name)
    return altered


def flush_conversations(settings: KafkaSettings, timeout_s: float = 30.0) -> int:
    """Have the brokers flush every record of the conversations that exist; how many were not flushed before."""
    parse = settings.names.parse_conversation
    topics = [topic for topic in partition_counts(settings) if parse(topic) is not None]
    # The name alone does not make it ours: another team's topic may be `conversation.events`.
    wanted = {
        topic: FLUSH
        for topic, config in topic_configs(settings, topics, timeout_s).items()
        if config["cleanup.policy"] == "compact" and not FLUSH.items() <= config.items()
    }
    return len(alter_topics(settings, wanted, timeout_s))


def flush_groups(settings: KafkaSettings, timeout_s: float = 30.0) -> None:
    """Have the brokers flush every record of theirs about groups: offsets, done maps, generations.

    Raises Forbidden when this client may not change that topic, and BrokerUnavailable.
    """
    if alter_topics(settings, {GROUPS_TOPIC: FLUSH}, timeout_s):
        return

    def ask(_: AdminClient, wait_s: float) -> None:
        # The brokers make the topic when somebody first asks for a group.
        with translated(f"flush {GROUPS_TOPIC}"):
            group = Consumer({**settings.librdkafka(), "group.id": settings.client_id}, logger=client_logger)
            try:
                group.committed([TopicPartition(settings.names.control, 0)], wait_s)
            finally:
                group.close()

    asked(settings, ask, timeout_s, refused_too=True)
    alter_topics(settings, {GROUPS_TOPIC: FLUSH}, timeout_s)


def flushes_groups(settings: KafkaSettings) -> bool:
    """Whether the brokers flush their records of groups; true while they have none."""
    found = topic_configs(settings, [GROUPS_TOPIC])
    return all(FLUSH.items() <= config.items() for config in found.values())
