"""Which topics and partitions a gateway reads, and from where. The functions block: for threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.settings import KafkaSettings
from penstock.gateway.limits.tenants import by_tenant
from penstock.gateway.view.claims import CLAIM_MS
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.topics import TP, TopicNames

UNKNOWN_S, MAX_UNKNOWN = 2.0, 1_000
"""So long, and so many, topics that were not there are remembered."""


def always_read(names: TopicNames) -> tuple[str, ...]:
    """Beside the request topics of all pools."""
    return (names.result, names.status, names.control, names.model, names.worker)


class MissingTopics(BrokerUnavailable):
    """The broker answers, and topics that a gateway needs do not exist."""


def require_topics(names: TopicNames, existing: Container[str]) -> None:
    """Raises MissingTopics when topics that a gateway needs do not exist."""
    missing = [topic for topic in (*always_read(names), *names.request_topics()) if topic not in existing]
    if missing:
        raise MissingTopics(f"missing topics: {', '.join(missing)}; create them with `penstock topics create`")


ListConversations = Callable[[], list[tuple[str, str]]]


def partitions_of(topics: Mapping[str, int]) -> list[TP]:
    """All partitions of topics with these counts."""
    return [(topic, number) for topic, count in topics.items() for number in range(count)]


def discover(settings: KafkaSettings) -> dict[str, int]:
    """Every topic that a view reads, with the number of its partitions. Raises MissingTopics, BrokerUnavailable."""
    names = settings.names
    counts = admin.partition_counts(settings)
    require_topics(names, counts)
    read = [*always_read(names), *(topic for topic in counts if names.is_request_topic(topic))]
    # An older installation may lack these.
    read += [topic for topic in (names.conversation_facts, names.idempotency, names.usage) if topic in counts]
    return {topic: counts[topic] for topic in read}


def conversations_by_tenant(settings: KafkaSettings, shared: ListConversations | None) -> dict[str, set[str]]:
    """The ids of all conversations. `shared` lists them where they have no topics of their own."""
    return by_tenant(admin.conversation_topics(settings).values() if shared is None else shared())


def where_to_begin(
    settings: KafkaSettings, topics: Mapping[str, int], stored: Mapping[TP, int], since_ms: int
) -> dict[TP, int]:
    """The stored offset of each partition; for others, and what retention has passed, the first record since a time."""
    partitions = partitions_of(topics)
    first = admin.begin_offsets(settings, partitions)
    end = admin.end_offsets(settings, partitions)
    # Models, workers and claims are kept in memory alone: what counts of them is read each time.
    names = settings.names
    in_memory = {names.model, names.worker, names.idempotency, names.usage}
    known = {
        tp: stored[tp]
        for tp in partitions
        if tp in stored and first[tp] <= stored[tp] <= end[tp] and tp[0] not in in_memory
    }
    from_the_start = {names.model, names.worker, names.conversation_facts, names.usage}
    begin = {tp: first[tp] for tp in partitions if tp[0] in from_the_start}
    claims = [tp for tp in partitions if tp[0] == names.idempotency]
    fresh = [tp for tp in partitions if tp not in known and tp not in begin and tp not in claims]
    claims_at = admin.offsets_at(settings, claims, now_ms() - 2 * CLAIM_MS)
    return begin | claims_at | admin.offsets_at(settings, fresh, since_ms) | known


class UnknownTopics:
    """Topics that somebody asked for and that were not there: they are not looked for again for a moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def __contains__(self, topic: str) -> bool:
        return self._clock() - self._since.get(topic, -UNKNOWN_S) < UNKNOWN_S

    def add(self, topic: str) -> None:
        self._since.pop(topic, None)
        while len(self._since) >= MAX_UNKNOWN:
            del self._since[next(iter(self._since))]
        self._since[topic] = self._clock()
