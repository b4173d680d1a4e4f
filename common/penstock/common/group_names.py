"""The name of a consumer group: with the installation's prefix, unless an earlier release began without it.

Earlier releases used one name for all prefixes, so that workers of two installations rebalanced each other. A group in
use keeps its name, because a new group begins at generation 1 and readers ignore events of lower epochs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaException, TopicPartition

from penstock.common import admin
from penstock.common.kafka_errors import client_logger, from_kafka
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

ASK_S = 10.0
COORDINATOR_S = 30.0
"""A broker that has just started creates the topic of offsets when it is asked for the first one."""
AGAIN_S = 0.2


def group_name(kafka: KafkaSettings, configured: str | None, base: str, topics: Sequence[str]) -> str:
    """`configured` if it is set. Else prefix + `base`, unless only the group `base` has offsets of these topics.

    All processes of an installation must ask for the same topics, so that they find the same name. Blocks. Raises
    BrokerUnavailable, and Forbidden if this client may not look at one of the groups.
    """
    if configured is not None or not kafka.topic_prefix:
        return configured or base
    own = kafka.topic_prefix + base
    counts = admin.partition_counts(kafka, topics, ASK_S)
    partitions = [(topic, number) for topic, count in counts.items() for number in range(count)]
    found = next((group for group in (own, base) if has_offsets(kafka, group, partitions)), own)
    logger.info("group.named group=%s", found)
    return found


def has_offsets(kafka: KafkaSettings, group: str, partitions: Sequence[TP]) -> bool:
    """Whether the group has committed an offset of one of these partitions. Raises as `group_name`."""
    asked = [TopicPartition(*tp) for tp in partitions]
    consumer = Consumer({**kafka.librdkafka(), "group.id": group, "enable.auto.commit": False}, logger=client_logger)
    give_up = time.monotonic() + COORDINATOR_S
    try:
        while True:
            try:
                found = consumer.committed(asked, ASK_S) if asked else []
                if (error := next((one.error for one in found if one.error is not None), None)) is not None:
                    raise KafkaException(error)  # unknown is not none
                return any(one.offset >= 0 for one in found)
            except KafkaException as error:
                failure = from_kafka(error, f"read the offsets of the group {group}", group=group)
                if not isinstance(failure, BrokerUnavailable) or time.monotonic() > give_up:
                    raise failure from error
                time.sleep(AGAIN_S)
    finally:
        consumer.close()
