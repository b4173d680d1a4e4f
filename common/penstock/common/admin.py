"""Topics: making them, comparing them with what they should be, and looking things up. All functions block.

Every function raises BrokerUnavailable when Kafka does not answer within `timeout_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from confluent_kafka import (
    IsolationLevel,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, NewTopic, OffsetSpec, ResourceType

from penstock.common.admin_clients import answer_of, asked, is_new, unanswered
from penstock.common.kafka_errors import missing_topic, translated, unavailable
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import Conflict, Forbidden, InternalError, NotFound, PenstockError
from penstock.schemas.topics import TP, TopicSpec, conversation_topic_config

TOPICS_A_REQUEST = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicReport:
    """What `ensure_topics` did or found. `drift` maps what differs to (wanted, found); nothing existing is changed."""

    name: str
    created: bool
    altered: bool = False
    drift: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicInfo:
    """A topic as it is. `config` holds all of its settings, defaults too."""

    name: str
    partitions: int
    replication: int
    config: Mapping[str, str]


def ensure_topics(settings: KafkaSettings, specs: Sequence[TopicSpec], timeout_s: float = 30.0) -> list[TopicReport]:
    """Create what is missing, wait until it is visible, and report how what existed differs from its spec."""
    names = [spec.name for spec in specs]
    created: set[str] = set()

    def look() -> list[TopicInfo]:
        # Each time again: a broker may still list a topic that has just been deleted, which nobody else would create.
        existing = partition_counts(settings, names, timeout_s)
        created.update(_create(settings, [spec for spec in specs if spec.name not in existing], timeout_s))
        return describe(settings, names, timeout_s)

    return _reports(specs, _visible(look, timeout_s), created)


def look_at_topics(
    settings: KafkaSettings, specs: Sequence[TopicSpec], timeout_s: float = 30.0
) -> tuple[list[TopicSpec], list[TopicReport]]:
    """The specs of topics that do not exist, and how those that do differ. Creates nothing."""
    there = describe(settings, [spec.name for spec in specs], timeout_s, missing_ok=True)
    names = {info.name for info in there}
    missing = [spec for spec in specs if spec.name not in names]
    return missing, _reports([spec for spec in specs if spec.name in names], there)


def _reports(specs: Sequence[TopicSpec], there: Iterable[TopicInfo], created: Container[str] = ()) -> list[TopicReport]:
    found = {info.name: info for info in there}
    return [
        TopicReport(name=spec.name, created=spec.name in created, drift=_drift(spec, found[spec.name]))
        for spec in specs
    ]


def describe(
    settings: KafkaSettings, topics: Sequence[str], timeout_s: float = 15.0, *, missing_ok: bool = False
) -> list[TopicInfo]:
    """The topics as they are. Raises NotFound for one that does not exist, unless `missing_ok`."""
    metadata = _descriptions(settings, topics, timeout_s, missing_ok=missing_ok)
    configs = topic_configs(settings, list(metadata), timeout_s)
    there = [name for name in topics if name in configs]
    if not missing_ok and len(there) < len(topics):
        raise NotFound(f"the topic {next(name for name in topics if name not in configs)} does not exist")
    return [
        TopicInfo(
            name=name,
            partitions=len(metadata[name].partitions),
            replication=len(metadata[name].partitions[0].replicas),
            config=configs[name],
        )
        for name in there
    ]


def topic_config(settings: KafkaSettings, topic: str, timeout_s: float = 10.0) -> dict[str, str]:
    """All settings of a topic. Raises NotFound."""
    found = topic_configs(settings, [topic], timeout_s)
    if topic not in found:
        raise NotFound(f"the topic {topic} does not exist")
    return found[topic]


def topic_configs(settings: KafkaSettings, topics: Sequence[str], timeout_s: float = 15.0) -> dict[str, dict[str, str]]:
    """All settings of each topic. Topics that do not exist are left out."""
    found: dict[str, dict[str, str]] = {}
    for names in in_groups(topics):
        found |= asked(settings, partial(_configs, names), timeout_s)
    return found


def _configs(topics: Sequence[str], client: AdminClient, wait_s: float) -> dict[str, dict[str, str]]:
    with translated("read the settings of topics"):
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]
        futures = client.describe_configs(resources, request_timeout=wait_s)
    found: dict[str, dict[str, str]] = {}
    for resource, future in futures.items():
        name = resource.name
        with suppress(NotFound):
            entries = answer_of(future, f"read the settings of {name}", wait_s, name)
            found[name] = {key: str(entry.value) for key, entry in entries.items()}
    return found


def in_groups(topics: Sequence[str]) -> Iterator[Sequence[str]]:
    """A controller refuses more than 10,000 settings in one request, and each topic's answer has some kilobytes."""
    for start in range(0, len(topics), TOPICS_A_REQUEST):
        yield topics[start : start + TOPICS_A_REQUEST]


def topic_id(settings: KafkaSettings, topic: str, timeout_s: float = 10.0) -> str | None:
    """Kafka's id of the topic (another one after it was deleted and made again); None when it does not exist.

    Raises BrokerUnavailable as `topic_ids`.
    """
    return topic_ids(settings, [topic], timeout_s).get(topic)


def topic_ids(settings: KafkaSettings, topics: Sequence[str], timeout_s: float = 10.0) -> dict[str, str]:
    """Kafka's ids of the topics that exist.

    A broker that has just started may know no topics yet: then it raises BrokerUnavailable, and takes none for deleted.
    """
    found: dict[str, str] = {}
    witness = settings.names.result
    for names in in_groups(topics):
        asked_for = list(dict.fromkeys((*names, witness)))
        descriptions = _descriptions(settings, asked_for, timeout_s, missing_ok=True)
        if witness not in descriptions:
            raise unavailable(missing_topic(witness))
        found |= {name: str(descriptions[name].topic_id) for name in names if name in descriptions}
    return found


def create_conversation_topic(
    settings: KafkaSettings,
    topic: str,
    *,
    durability: str = "replicas",
    timeout_s: float = 15.0,
) -> bool:
    """Create a compacted topic of one partition and wait until it is visible; False when it exists already.

    Raises Conflict where conversations share a topic by now.
    """
    if topic_id(settings, settings.names.conversation_log, timeout_s) is not None:
        raise Conflict("conversations share a topic since this process was started: start it again")
    count = broker_count(settings, timeout_s)
    config = conversation_topic_config(brokers=count, durability=durability)
    spec = TopicSpec(name=topic, partitions=1, replication=3 if count >= 3 else 1, config=config)
    created = _create(settings, [spec], timeout_s)
    _visible(lambda: describe(settings, [topic], timeout_s), timeout_s)
    return bool(created)


def delete_topic(settings: KafkaSettings, topic: str, timeout_s: float = 15.0) -> bool:
    """False when it does not exist."""

    def ask(client: AdminClient, wait_s: float) -> bool:
        future = client.delete_topics([topic], operation_timeout=wait_s, request_timeout=wait_s)[topic]
        try:
            answer_of(future, f"delete {topic}", wait_s, topic)
        except NotFound:
            return False
        return True

    return asked(settings, ask, timeout_s)


def delete_records(settings: KafkaSettings, before: Mapping[TP, int], timeout_s: float = 15.0) -> None:
    """Delete the records of each partition that are before an offset. Raises BrokerUnavailable."""

    def ask(client: AdminClient, wait_s: float) -> None:
        wanted = [TopicPartition(*tp, offset) for tp, offset in before.items()]
        for place, answer in client.delete_records(wanted, request_timeout=wait_s).items():
            answer_of(answer, "delete records", wait_s, place.topic)

    asked(settings, ask, timeout_s)


def partition_counts(
    settings: KafkaSettings, topics: Iterable[str] | None = None, timeout_s: float = 10.0
) -> dict[str, int]:
    """Partitions of all topics, or of those given. Topics that do not exist are left out."""
    if topics is not None:
        found = _descriptions(settings, list(topics), timeout_s, missing_ok=True)
        return {name: len(description.partitions) for name, description in found.items()}
    metadata = _metadata(settings, timeout_s)
    return {name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None}


def broker_count(settings: KafkaSettings, timeout_s: float = 10.0) -> int:
    """How many brokers the cluster has. One that is away counts while the result topic has replicas on it."""
    metadata = _metadata(settings, timeout_s)
    results = metadata.topics.get(settings.names.result)
    replicas = [] if results is None else [partition.replicas for partition in results.partitions.values()]
    return len({*metadata.brokers}.union(*replicas))


def topic_replicas(settings: KafkaSettings, topics: Sequence[str]) -> tuple[dict[str, list[list[int]]], list[int]]:
    """The brokers that hold each partition of the topics, the preferred leader first, and all brokers."""
    metadata = _metadata(settings, 10.0)
    found = {
        topic: [
            list(metadata.topics[topic].partitions[number].replicas)
            for number in sorted(metadata.topics[topic].partitions)
        ]
        for topic in topics
    }
    return found, sorted(metadata.brokers)


def known_topics(settings: KafkaSettings, timeout_s: float = 10.0) -> dict[str, int]:
    """Partitions of all topics. Raises BrokerUnavailable as `topic_ids`: there may be topics that are not named."""
    counts = partition_counts(settings, timeout_s=timeout_s)
    if settings.names.result not in counts:
        raise unavailable(missing_topic(settings.names.result))
    return counts


def conversation_topics(settings: KafkaSettings, timeout_s: float = 10.0) -> dict[str, tuple[str, str]]:
    """The topics of conversations, each with its tenant and id. Raises BrokerUnavailable as `known_topics`."""
    parse = settings.names.parse_conversation
    return {topic: found for topic in known_topics(settings, timeout_s) if (found := parse(topic)) is not None}


def count_conversations(settings: KafkaSettings, timeout_s: float = 10.0) -> int:
    """How many conversation topics exist under the prefix."""
    parse = settings.names.parse_conversation
    return sum(parse(name) is not None for name in partition_counts(settings, timeout_s=timeout_s))


def settled_counts(settings: KafkaSettings, within_s: float = 5.0) -> dict[str, int]:
    """Partitions of all topics. A broker that has just started may know none yet: it is asked again for some seconds.

    An installation whose result topic does not exist looks the same.
    """
    give_up = time.monotonic() + within_s
    while settings.names.result not in (counts := partition_counts(settings)) and time.monotonic() < give_up:
        time.sleep(0.2)
    return counts


def check_group(settings: KafkaSettings, group: str, timeout_s: float = 10.0) -> None:
    """Ask for a group, which need not exist. Raises Forbidden, which names the group and the right it needs.

    A consumer would hear of a missing right only by a timeout.
    """

    def ask(client: AdminClient, wait_s: float) -> None:
        found = client.describe_consumer_groups([group], request_timeout=wait_s)[group]
        answer_of(found, f"read the offsets of the group {group}", wait_s, group=group)

    asked(settings, ask, timeout_s)


def begin_offsets(settings: KafkaSettings, partitions: Iterable[TP], timeout_s: float = 10.0) -> dict[TP, int]:
    """The first offset that each partition still has."""
    return _offsets(settings, partitions, OffsetSpec.earliest(), timeout_s)


def end_offsets(settings: KafkaSettings, partitions: Iterable[TP], timeout_s: float = 10.0) -> dict[TP, int]:
    """Up to where each partition can be read: the offset of its next record, or where an open transaction begins."""
    return _offsets(settings, partitions, OffsetSpec.latest(), timeout_s)


def log_ends(settings: KafkaSettings, partitions: Iterable[TP], timeout_s: float = 10.0) -> dict[TP, int]:
    """Where each partition ends, with the records of open transactions, which cannot be read yet."""
    return _offsets(settings, partitions, OffsetSpec.latest(), timeout_s, IsolationLevel.READ_UNCOMMITTED)


def newest_times(settings: KafkaSettings, topics: Sequence[str], timeout_s: float = 10.0) -> dict[str, int]:
    """When the newest record of each topic's partition 0 was written, in ms; a topic without records is absent."""
    found = _looked_up(settings, [(topic, 0) for topic in topics], OffsetSpec.max_timestamp(), timeout_s)
    return {topic: int(info.timestamp) for (topic, _), info in found.items() if info.offset >= 0}


def offsets_at(
    settings: KafkaSettings, partitions: Iterable[TP], time_ms: int, timeout_s: float = 10.0
) -> dict[TP, int]:
    """The first offset of each partition whose record is not older than `time_ms`; the end when there is none."""
    wanted = list(partitions)
    # Asked for before the times: a record that comes in between is found by its time, or is behind this end.
    ends = end_offsets(settings, wanted, timeout_s)
    found = _offsets(settings, wanted, OffsetSpec.for_timestamp(time_ms), timeout_s)
    return {tp: offset if offset >= 0 else ends[tp] for tp, offset in found.items()}


def _offsets(
    settings: KafkaSettings,
    partitions: Iterable[TP],
    spec: Any,
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[TP, int]:
    return {tp: int(info.offset) for tp, info in _looked_up(settings, partitions, spec, timeout_s, isolation).items()}


def _looked_up(
    settings: KafkaSettings,
    partitions: Iterable[TP],
    spec: Any,
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[TP, Any]:
    """What `spec` means in each. A partition without a leader (just created, or its broker restarts) is asked again."""
    specs = {TopicPartition(*tp): spec for tp in dict.fromkeys(partitions)}
    if not specs:
        return {}

    def ask(client: AdminClient, wait_s: float) -> dict[TP, Any]:
        with translated("look up offsets"):
            futures = client.list_offsets(specs, isolation_level=isolation, request_timeout=wait_s)
        return {
            (tp.topic, tp.partition): answer_of(future, f"look up offsets of {tp.topic}", wait_s, tp.topic)
            for tp, future in futures.items()
        }

    return asked(settings, ask, timeout_s, refused_too=True)


def _visible(look: Callable[[], list[TopicInfo]], timeout_s: float) -> list[TopicInfo]:
    """What `look` finds of topics that were created a moment ago: a broker knows of them some milliseconds later."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            return look()
        except NotFound:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)


def _create(settings: KafkaSettings, specs: Sequence[TopicSpec], timeout_s: float) -> set[str]:
    """The names of those that were created now and not by somebody else at the same time."""
    if not specs:
        return set()
    new = [
        NewTopic(spec.name, spec.partitions, replication_factor=spec.replication, config=dict(spec.config))
        for spec in specs
    ]
    created: set[str] = set()

    def ask(client: AdminClient, wait_s: float) -> None:
        futures = client.create_topics(new, operation_timeout=wait_s, request_timeout=wait_s)
        for name, future in futures.items():
            if is_new(future, f"create {name}", wait_s):
                created.add(name)

    asked(settings, ask, timeout_s)
    return created


def _drift(spec: TopicSpec, found: TopicInfo) -> dict[str, tuple[str, str]]:
    wanted = {"partitions": str(spec.partitions), "replication": str(spec.replication), **spec.config}
    actual = {"partitions": str(found.partitions), "replication": str(found.replication), **found.config}
    return {
        name: (value, actual.get(name, "unset"))
        for name, value in wanted.items()
        if set(value.split(",")) != set(actual.get(name, "unset").split(","))
    }


def _metadata(settings: KafkaSettings, timeout_s: float) -> Any:
    def ask(client: AdminClient, wait_s: float) -> Any:
        try:
            return client.list_topics(timeout=wait_s)
        except KafkaException as error:
            raise unanswered(error, f"reach Kafka at {settings.bootstrap_servers}") from error

    return asked(settings, ask, timeout_s)


def lacking(settings: KafkaSettings, operations: Mapping[str, str], timeout_s: float = 10.0) -> set[str]:
    """The topics for which this client has no right to the operation that is given with each, as `WRITE`."""
    allowed = topic_operations(settings, list(operations), timeout_s)
    return {topic for topic, found in allowed.items() if operations[topic] not in found}


def topic_operations(settings: KafkaSettings, topics: Sequence[str], timeout_s: float = 10.0) -> dict[str, set[str]]:
    """What this client may do with each topic: `READ`, …; nothing if it may not even describe it.

    Topics that it may describe and that do not exist are left out.
    """
    found = _descriptions(settings, topics, timeout_s, missing_ok=True, operations=True)
    return {topic: set() if one is None else _operations(one) for topic, one in found.items()}


def group_operations(settings: KafkaSettings, groups: Sequence[str], timeout_s: float = 10.0) -> dict[str, set[str]]:
    """As `topic_operations`, for groups."""

    def ask(client: AdminClient, wait_s: float) -> dict[str, set[str]]:
        futures = client.describe_consumer_groups(
            list(groups), include_authorized_operations=True, request_timeout=wait_s
        )
        found: dict[str, set[str]] = {}
        for group, future in futures.items():
            try:
                found[group] = _operations(answer_of(future, f"look up the group {group}", wait_s, group=group))
            except Forbidden:
                found[group] = set()
            except InternalError:  # GROUP_ID_NOT_FOUND: it may be described, and nobody has joined it
                continue
        return found

    return asked(settings, ask, timeout_s) if groups else {}


def broker_settings(settings: KafkaSettings, timeout_s: float = 10.0) -> tuple[int, dict[str, str]]:
    """(number of brokers, the settings of one of them). Raises Forbidden without DESCRIBE_CONFIGS on the cluster."""
    brokers = list(_metadata(settings, timeout_s).brokers)

    def ask(client: AdminClient, wait_s: float) -> dict[str, str]:
        resource = ConfigResource(ResourceType.BROKER, str(brokers[0]))
        future = client.describe_configs([resource], request_timeout=wait_s)[resource]
        entries = answer_of(future, "read the settings of a broker", wait_s)
        return {name: entry.value for name, entry in entries.items() if entry.value is not None}

    return len(brokers), asked(settings, ask, timeout_s)


def may_create(settings: KafkaSettings, topic: str, timeout_s: float = 10.0) -> bool:
    """Whether this client may create a topic of this name. Creates nothing."""

    def ask(client: AdminClient, wait_s: float) -> bool:
        futures = client.create_topics([NewTopic(topic, 1)], validate_only=True, request_timeout=wait_s)
        try:
            is_new(futures[topic], f"create {topic}", wait_s)
        except Forbidden:
            return False
        return True

    return asked(settings, ask, timeout_s)


def _operations(description: Any) -> set[str]:
    """A broker without an authorizer, or an old one, names none: all are allowed."""
    found = description.authorized_operations
    return {one.name for one in (AclOperation if found is None else found)}


def _descriptions(
    settings: KafkaSettings,
    topics: Sequence[str],
    timeout_s: float,
    *,
    missing_ok: bool = False,
    operations: bool = False,
) -> dict[str, Any]:
    if not topics:
        return {}

    def ask(client: AdminClient, wait_s: float) -> dict[str, Any]:
        with translated("look up topics"):
            futures = client.describe_topics(
                TopicCollection(list(topics)), request_timeout=wait_s, include_authorized_operations=operations
            )
        found: dict[str, Any] = {}
        for name, future in futures.items():
            try:
                found[name] = answer_of(future, f"look up {name}", wait_s, name)
            except PenstockError as error:
                if operations and isinstance(error, Forbidden):
                    found[name] = None  # it may not even be described
                elif not (missing_ok and error.code == missing_topic(name).code):
                    raise
        return found

    return asked(settings, ask, timeout_s)
