"""Over how many partitions of the shared topic its conversations are spread: partitions that are added stay unused.

A conversation is in the partition that its key had when it began. Kafka does not keep how many partitions there
were; the records tell it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from penstock.common import admin
from penstock.common.kafka_errors import missing_topic, unavailable
from penstock.common.reader import RawMessage, read_ranges
from penstock.common.settings import KafkaSettings
from penstock.common.shards.addresses import split_key
from penstock.schemas.topics import TP, partition_for

SAMPLE = 200
"""How many records are looked at from either end of a partition."""


def partitions_in_use(settings: KafkaSettings, timeout_s: float = 10.0) -> int | None:
    """Over how many partitions of their topic conversations are spread; None: each has a topic of its own.

    Raises BrokerUnavailable as `admin.topic_ids`.
    """
    topic, witness = settings.names.conversation_log, settings.names.result
    counts = admin.partition_counts(settings, [topic, witness], timeout_s)
    if witness not in counts:
        raise unavailable(missing_topic(witness))
    count = counts.get(topic)
    return None if count is None else used_of(settings, count, timeout_s)


def used_of(settings: KafkaSettings, count: int, timeout_s: float = 10.0) -> int:
    """The same, of a topic that has `count` partitions. Raises BrokerUnavailable."""
    return fitting(_places(settings, count, timeout_s), count)


def fitting(places: Collection[tuple[str, int]], count: int) -> int:
    """Of the numbers up to `count` the one that explains most conversations' partitions; of several the largest. Pure.

    `places` are conversations with the partitions in which they stand. Records that others put elsewhere change nothing
    as long as they are few.
    """
    explained = {
        number: sum(partition_for(conversation.encode(), number) == partition for conversation, partition in places)
        for number in range(1, count + 1)
    }
    return max(explained, key=lambda number: (explained[number], number))


def _places(settings: KafkaSettings, count: int, timeout_s: float) -> set[tuple[str, int]]:
    give_up = time.monotonic() + timeout_s
    partitions = [(settings.names.conversation_log, partition) for partition in range(count)]
    first = admin.begin_offsets(settings, partitions, timeout_s)
    end = admin.end_offsets(settings, partitions, timeout_s)
    oldest: Mapping[TP, tuple[int, int]] = {tp: (first[tp], end[tp]) for tp in partitions}
    newest = {tp: (max(first[tp], end[tp] - SAMPLE), end[tp]) for tp in partitions}
    found: list[RawMessage] = [
        *read_ranges(settings, oldest, give_up, SAMPLE),
        *read_ranges(settings, newest, give_up, SAMPLE),
    ]
    return {(split[0], one.partition) for one in found if (split := split_key(one.key)) is not None}
