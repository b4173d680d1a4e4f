"""Topics: making them, comparing them with what they should be, and looking things up. All functions block.

Every function raises BrokerUnavailable when Kafka does not answer within `timeout_s`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, ResourceType

from penstock.producers.forking import in_a_child, keep_for_ever, keep_in_children
from penstock.producers.kafka_errors import (
    client_logger,
    from_kafka,
    missing_topic,
    translated,
    wrong_configuration,
)
from penstock.producers.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError
from penstock.schemas.topics import TP, TopicSpec, conversation_topic_config

Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicReport:
    """What `ensure_topics` did or found. `drift` maps what differs to (wanted, found); nothing existing is changed."""

    name: str
    created: bool
    drift: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicInfo:
    """A topic as it is. `config` holds all of its settings, defaults too."""

    name: str
    partitions: int
    replication: int
    config: Mapping[str, str]


STUCK_S = 3.0
"""An answer about the cluster that takes longer is asked for again with a new client."""

_clients: dict[tuple[object, ...], AdminClient] = {}
RENEW_S = 1.0
"""A client is not replaced before it is so old: an outage would pile them up."""
_made_at: dict[tuple[object, ...], float] = {}
_clients_lock = threading.Lock()


def admin_client(settings: KafkaSettings) -> AdminClient:
    """The process's admin client for these settings; connecting one per call would cost more than the calls.

    Hold it until its answer is there: one that was replaced ends, with its threads, when nobody holds it any more.
    """
    key = _key(settings)
    with _clients_lock:
        if key not in _clients:
            _made_at[key] = time.monotonic()
            config = settings.librdkafka()
            del config["allow.auto.create.topics"]  # a consumer's property
            try:
                _clients[key] = AdminClient(config, logger=client_logger)
            except KafkaException as error:
                raise wrong_configuration(error) from error
            keep_in_children(_clients[key])
        return _clients[key]


def _begin_anew() -> None:
    """In a forked child: make clients of its own."""
    global _clients_lock
    _clients_lock = threading.Lock()  # another thread of the parent may have held it
    _clients.clear()


def _leave_as_they_are() -> None:
    """At the process's end: admin clients have nothing to hand in, and one that hangs would hold the process back."""
    for client in _clients.values():
        keep_for_ever(client)


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(_leave_as_they_are)


def _key(settings: KafkaSettings) -> tuple[object, ...]:
    return (settings.bootstrap_servers, settings.client_id, *sorted(settings.security.items()))


def _forget(settings: KafkaSettings, client: AdminClient) -> None:
    """Begin with a new client: one that lost its broker can stay without any connection for a minute and more."""
    key = _key(settings)
    with _clients_lock:
        if _clients.get(key) is client and time.monotonic() - _made_at.get(key, 0.0) >= RENEW_S:
            if in_a_child():
                keep_for_ever(client)
            del _clients[key]


def ensure_topics(settings: KafkaSettings, specs: Sequence[TopicSpec], timeout_s: float = 30.0) -> list[TopicReport]:
    """Create what is missing, wait until it is visible, and report how what existed differs from its spec."""
    existing = partition_counts(settings, timeout_s=timeout_s)
    missing = [spec for spec in specs if spec.name not in existing]
    created = _create(settings, missing, timeout_s)
    found = {info.name: info for info in _visible(settings, [spec.name for spec in specs], timeout_s)}
    return [
        TopicReport(name=spec.name, created=spec.name in created, drift=_drift(spec, found[spec.name]))
        for spec in specs
    ]


def describe(settings: KafkaSettings, topics: Sequence[str], timeout_s: float = 15.0) -> list[TopicInfo]:
    """The topics as they are. Raises NotFound for one that does not exist."""
    metadata = _descriptions(settings, topics, timeout_s)
    configs = topic_configs(settings, topics, timeout_s)
    return [
        TopicInfo(
            name=name,
            partitions=len(metadata[name].partitions),
            replication=len(metadata[name].partitions[0].replicas),
            config=configs[name],
        )
        for name in topics
    ]


def topic_config(settings: KafkaSettings, topic: str, timeout_s: float = 10.0) -> dict[str, str]:
    """All settings of a topic. Raises NotFound."""
    return topic_configs(settings, [topic], timeout_s)[topic]


def topic_configs(settings: KafkaSettings, topics: Sequence[str], timeout_s: float = 15.0) -> dict[str, dict[str, str]]:
    """All settings of each topic. Raises NotFound."""
    if not topics:
        return {}
    resources = [ConfigResource(ResourceType.TOPIC, name) for name in topics]

    def ask(client: AdminClient, wait_s: float) -> dict[str, dict[str, str]]:
        with translated("read the settings of topics"):
            futures = client.describe_configs(resources, request_timeout=wait_s)
        found: dict[str, dict[str, str]] = {}
        for resource, future in futures.items():
            name = resource.name
            entries = _wait(future, f"read the settings of {name}", wait_s, name)
            found[name] = {key: str(entry.value) for key, entry in entries.items()}
        return found

    return _asked(settings, ask, timeout_s)


def topic_id(settings: KafkaSettings, topic: str, timeout_s: float = 10.0) -> str | None:
    """Kafka's id of the topic (another one after it was deleted and made again); None when it does not exist."""
    found = _descriptions(settings, [topic], timeout_s, missing_ok=True).get(topic)
    return None if found is None else str(found.topic_id)


def create_conversation_topic(
    settings: KafkaSettings,
    topic: str,
    *,
    durability: str = "replicas",
    brokers: int | None = None,
    timeout_s: float = 15.0,
) -> bool:
    """Create a compacted topic of one partition and wait until it is visible; False when it exists already.

    The brokers are counted when `brokers` is not given.
    """
    count = broker_count(settings, timeout_s) if brokers is None else brokers
    config = conversation_topic_config(brokers=count, durability=durability)
    spec = TopicSpec(name=topic, partitions=1, replication=3 if count >= 3 else 1, config=config)
    created = _create(settings, [spec], timeout_s)
    _visible(settings, [topic], timeout_s)
    return bool(created)


def delete_topic(settings: KafkaSettings, topic: str, timeout_s: float = 15.0) -> bool:
    """False when it does not exist."""

    def ask(client: AdminClient, wait_s: float) -> bool:
        future = client.delete_topics([topic], operation_timeout=wait_s, request_timeout=wait_s)[topic]
        try:
            _wait(future, f"delete {topic}", wait_s, topic)
        except NotFound:
            return False
        return True

    return _asked(settings, ask, timeout_s)


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
    """How many brokers the cluster has now."""
    return len(_metadata(settings, timeout_s).brokers)


def count_conversations(settings: KafkaSettings, timeout_s: float = 10.0) -> int:
    """How many conversation topics exist under the prefix."""
    parse = settings.names.parse_conversation
    return sum(parse(name) is not None for name in partition_counts(settings, timeout_s=timeout_s))


def begin_offsets(settings: KafkaSettings, partitions: Iterable[TP], timeout_s: float = 10.0) -> dict[TP, int]:
    """The first offset that each partition still has."""
    return _offsets(settings, _all(partitions, OffsetSpec.earliest()), timeout_s)


def end_offsets(settings: KafkaSettings, partitions: Iterable[TP], timeout_s: float = 10.0) -> dict[TP, int]:
    """Up to where each partition can be read: the offset of its next record, or where an open transaction begins."""
    return _offsets(settings, _all(partitions, OffsetSpec.latest()), timeout_s)


def offsets_at(
    settings: KafkaSettings, partitions: Iterable[TP], time_ms: int, timeout_s: float = 10.0
) -> dict[TP, int]:
    """The first offset of each partition whose record is not older than `time_ms`; the end when there is none."""
    wanted = list(partitions)
    found = _offsets(settings, _all(wanted, OffsetSpec.for_timestamp(time_ms)), timeout_s)
    none_so_new = [partition for partition in wanted if found[partition] < 0]
    # Asked for after the times: a record that came in between is older than nobody's wish to see it.
    return found | end_offsets(settings, none_so_new, timeout_s) if none_so_new else found


def _all(partitions: Iterable[TP], spec: Any) -> Mapping[TP, OffsetSpec]:
    return cast("Mapping[TP, OffsetSpec]", dict.fromkeys(partitions, spec))


def _offsets(settings: KafkaSettings, specs: Mapping[TP, OffsetSpec], timeout_s: float) -> dict[TP, int]:
    """Offsets by spec. A partition without a leader (just created, or its broker restarts) is asked again."""
    if not specs:
        return {}
    return _asked(settings, lambda client, wait_s: _list_offsets(client, specs, wait_s), timeout_s, refused_too=True)


def _list_offsets(client: AdminClient, specs: Mapping[TP, OffsetSpec], timeout_s: float) -> dict[TP, int]:
    with translated("look up offsets"):
        futures = client.list_offsets(
            {TopicPartition(topic, partition): spec for (topic, partition), spec in specs.items()},
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=timeout_s,
        )
    return {
        (tp.topic, tp.partition): int(_wait(future, f"look up offsets of {tp.topic}", timeout_s, tp.topic).offset)
        for tp, future in futures.items()
    }


def _visible(settings: KafkaSettings, topics: Sequence[str], timeout_s: float) -> list[TopicInfo]:
    """Describe topics that may have been created a moment ago: a broker knows of them some milliseconds later."""
    give_up = time.monotonic() + timeout_s
    while True:
        try:
            return describe(settings, topics, timeout_s)
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
            if _is_new(future, f"create {name}", wait_s):
                created.add(name)

    _asked(settings, ask, timeout_s)
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
            raise _error(error, f"reach Kafka at {settings.bootstrap_servers}") from error

    return _asked(settings, ask, timeout_s)


def _descriptions(
    settings: KafkaSettings, topics: Sequence[str], timeout_s: float, *, missing_ok: bool = False
) -> dict[str, Any]:
    if not topics:
        return {}

    def ask(client: AdminClient, wait_s: float) -> dict[str, Any]:
        with translated("look up topics"):
            futures = client.describe_topics(TopicCollection(list(topics)), request_timeout=wait_s)
        found: dict[str, Any] = {}
        for name, future in futures.items():
            try:
                found[name] = _wait(future, f"look up {name}", wait_s, name)
            except PenstockError as error:
                if not (missing_ok and error.code == missing_topic(name).code):
                    raise
        return found

    return _asked(settings, ask, timeout_s)


class _Silent(BrokerUnavailable):
    """Nothing was heard at all, in place of a refusal: the client may be stuck."""


_NOT_HEARD = frozenset(
    {KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}  # pyright: ignore[reportPrivateUsage]
)


def _asked(
    settings: KafkaSettings,
    ask: Callable[[AdminClient, float], Answer],
    timeout_s: float,
    *,
    refused_too: bool = False,
) -> Answer:
    """What Kafka answers to `ask(client, seconds to wait)`, tried again with a new client when nothing is heard.

    With `refused_too` also what a broker refuses for now is asked again. `ask` may be carried out more than once.
    """
    give_up = time.monotonic() + timeout_s
    wait_s = STUCK_S
    for tries in itertools.count(1):
        client = admin_client(settings)  # held until all is answered
        try:
            return ask(client, max(0.1, min(wait_s, give_up - time.monotonic())))
        except BrokerUnavailable as error:
            # After a broker's restart librdkafka also keeps asking with the leader epoch of before, and is refused for
            # minutes: only a new client learns the new one.
            silent = isinstance(error, _Silent)
            if silent or tries % 5 == 0:
                _forget(settings, client)
            if not (silent or refused_too) or time.monotonic() >= give_up:
                raise
        wait_s = wait_s * 2 if silent else wait_s
        time.sleep(0.02)
    raise AssertionError("unreachable")


def _wait(future: Future[Any], doing: str, wait_s: float, topic: str) -> Any:
    if (error := _heard(future, doing, wait_s)) is not None:
        raise from_kafka(error, doing, topic)
    return future.result()


def _is_new(future: Future[Any], doing: str, wait_s: float) -> bool:
    """Whether what was to be made was made now; False when it existed. Any other error is raised."""
    error = _heard(future, doing, wait_s)
    if error is not None and error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
        raise from_kafka(error, doing)
    return error is None


def _heard(future: Future[Any], doing: str, wait_s: float) -> KafkaException | None:
    """The broker's refusal, if any. Raises _Silent when nothing was heard, and whatever else went wrong."""
    # Raised by `result`, the error would refer to the frames that hold the future and the client: a cycle that keeps
    # a client's threads until the collector comes by.
    try:
        error = future.exception(wait_s + 1)
    except TimeoutError as late:
        raise _Silent(f"{doing}: no answer within {wait_s:.0f} s", retry_after_s=1.0) from late
    if error is None:
        return None
    if not isinstance(error, KafkaException):
        raise error
    if error.args[0].code() in _NOT_HEARD:
        raise _error(error, doing)
    return error


def _error(error: KafkaException, doing: str, topic: str | None = None) -> PenstockError:
    ours = from_kafka(error, doing, topic)
    return _Silent(str(ours), retry_after_s=1.0) if error.args[0].code() in _NOT_HEARD else ours
