"""Kafka's errors as ours: one table, used by every client here."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from penstock.common.refused_connections import refusal, setting_name
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    PenstockError,
    TooLarge,
)
from penstock.schemas.logs import OncePer

client_logger = logging.getLogger("penstock.kafka")
"""Where librdkafka's own log lines go, instead of the standard error stream; silent unless logging is set up."""
client_logger.addHandler(logging.NullHandler())


def _name_setting(record: logging.LogRecord) -> bool:
    """Add to a line about a refused connection which setting is to be corrected."""
    if (found := refusal(record.getMessage())) is not None:
        record.msg, record.args = f"{record.getMessage()}; check {setting_name(found.setting)}", ()
    return True


_CLIENT = re.compile(r"\[[^]]*\]| \(after .*?\)")
# A client without a broker repeats itself every second, and a process has several clients:
# "FAIL [client#consumer-1] [thrd:…]: host:port: Connect to … failed: … (after 0ms in state CONNECT)"
client_logger.addFilter(OncePer(30.0, lambda record: _CLIENT.sub("", record.getMessage())))
client_logger.addFilter(_name_setting)

_MISSING = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # pyright: ignore[reportPrivateUsage]
)
_DENIED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError._AUTHENTICATION,  # pyright: ignore[reportPrivateUsage]
        KafkaError.SASL_AUTHENTICATION_FAILED,
    }
)
# Numbers of Kafka's protocol that confluent-kafka 2.10 has no names for.
_INCONSISTENT_TOPIC_ID, _UNKNOWN_CONTROLLER_ID = 103, 116
# What passes by itself when brokers start, stop or change leaders.
_AWAY = frozenset(
    {
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
        _INCONSISTENT_TOPIC_ID,
        # Asked for as many replicas as there were brokers: fewer are registered while some restart.
        KafkaError.INVALID_REPLICATION_FACTOR,
        KafkaError.PREFERRED_LEADER_NOT_AVAILABLE,
        KafkaError.STALE_BROKER_EPOCH,
        KafkaError.STALE_CTRL_EPOCH,
        KafkaError.THROTTLING_QUOTA_EXCEEDED,
        KafkaError.UNKNOWN,  # "unknown server error": what a broker says of its own trouble
        _UNKNOWN_CONTROLLER_ID,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.LISTENER_NOT_FOUND,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._ALL_BROKERS_DOWN,  # pyright: ignore[reportPrivateUsage]
        # Answers that were cut off, and questions that a lost broker left open.
        KafkaError._BAD_MSG,  # pyright: ignore[reportPrivateUsage]
        KafkaError._FAIL,  # pyright: ignore[reportPrivateUsage]
        KafkaError._INTR,  # pyright: ignore[reportPrivateUsage]
        KafkaError._IN_PROGRESS,  # pyright: ignore[reportPrivateUsage]
        KafkaError._ISR_INSUFF,  # pyright: ignore[reportPrivateUsage]
        KafkaError._NODE_UPDATE,  # pyright: ignore[reportPrivateUsage]
        KafkaError._NOENT,  # pyright: ignore[reportPrivateUsage]  # "failed to query partition leaders": no broker is known that leads them
        KafkaError._OUTDATED,  # pyright: ignore[reportPrivateUsage]
        KafkaError._PARTIAL,  # pyright: ignore[reportPrivateUsage]
        KafkaError._RETRY,  # pyright: ignore[reportPrivateUsage]
        KafkaError._UNDERFLOW,  # pyright: ignore[reportPrivateUsage]
        KafkaError._UNKNOWN_BROKER,  # pyright: ignore[reportPrivateUsage]
        KafkaError._WAIT_CACHE,  # pyright: ignore[reportPrivateUsage]
        KafkaError._WAIT_COORD,  # pyright: ignore[reportPrivateUsage]
        KafkaError._MSG_TIMED_OUT,  # pyright: ignore[reportPrivateUsage]
        KafkaError._TIMED_OUT,  # pyright: ignore[reportPrivateUsage]
        KafkaError._TIMED_OUT_QUEUE,  # pyright: ignore[reportPrivateUsage]
        KafkaError._TRANSPORT,  # pyright: ignore[reportPrivateUsage]
        KafkaError._RESOLVE,  # pyright: ignore[reportPrivateUsage]
        KafkaError._PURGE_QUEUE,  # pyright: ignore[reportPrivateUsage]
        KafkaError._PURGE_INFLIGHT,  # pyright: ignore[reportPrivateUsage]
        KafkaError._DESTROY,  # pyright: ignore[reportPrivateUsage]
        # A broker that was paused for longer than its session is missing in the metadata for a moment, and librdkafka
        # drops its handle with all that was asked of it.
        KafkaError._DESTROY_BROKER,  # pyright: ignore[reportPrivateUsage]
    }
)


@contextmanager
def translated(doing: str, topic: str | None = None) -> Generator[None]:
    """Whatever Kafka raises within, as our own error. `topic`: the one that is read. Raises as `from_kafka` says."""
    try:
        yield
    except KafkaException as error:
        raise from_kafka(error, doing, topic, operation="READ") from error
    except TimeoutError as error:
        raise BrokerUnavailable(f"{doing}: no answer", retry_after_s=1.0) from error


def missing_topic(topic: str) -> NotFound:
    """The error for a topic that is not there."""
    return NotFound(
        f"topic {topic} does not exist; create the topics with `penstock topics create`", details={"topic": topic}
    )


def unavailable(missing: NotFound | Forbidden) -> BrokerUnavailable:
    """The error of a service whose own topic or right is missing: its caller can only wait, its operator mends that.

    A broker that has just started may not know its topics yet: then waiting is enough. `missing` is its cause, from
    which `may_be_written` knows that no record was written.
    """
    error = BrokerUnavailable(missing.message, details=missing.details, retry_after_s=1)
    error.__cause__ = missing
    return error


def may_be_written(error: BaseException) -> bool:
    """Whether the record that was refused with this may stand on its topic all the same."""
    return isinstance(error, BrokerUnavailable) and not isinstance(error.__cause__, NotFound | Forbidden)


def too_large(topic: str, size_bytes: int, limit_bytes: int) -> TooLarge:
    """The error for a record over the limit, naming it."""
    return TooLarge(
        f"a record of {size_bytes} bytes for {topic} is over max_record_bytes = {limit_bytes}",
        details={"size_bytes": size_bytes, "limit_bytes": limit_bytes},
    )


def wrong_configuration(error: KafkaException) -> InvalidRequest:
    """The error for settings that librdkafka does not take; mostly a name or value in `security`."""
    cause = error.args[0] if error.args else error
    reason = cause.str() if isinstance(cause, KafkaError) else str(cause)
    named = re.search(r"\b(?:sasl|ssl|security|https|enable)(?:\.[a-z0-9]+)+", reason)
    setting = setting_name(named[0]) if named else "kafka.security"
    return InvalidRequest(f"the Kafka settings are wrong: {reason}; check {setting}", param=setting)


def missing_right(error: KafkaError, group: str | None, topic: str | None, operation: str = "READ") -> str | None:
    """What this client may not do, in its group or not, if that is what the error says."""
    if error.code() not in _DENIED:
        return None
    needs = ""
    if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and group:
        needs = f"; needs READ on the group {group}"
    elif error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and topic:
        needs = f"; needs {operation} on the topic {topic}"
    return f"Kafka refuses this client: {error.str()}{needs}"


def from_kafka(
    error: KafkaError | KafkaException,
    doing: str,
    topic: str | None = None,
    group: str | None = None,
    operation: str | None = None,
) -> PenstockError:
    """The typed error of what Kafka said while `doing` something, for which it looks at a topic or a group.

    `operation`: the right that this takes on the topic.
    """
    if isinstance(error, KafkaException):
        cause = error.args[0] if error.args else None
        if not isinstance(cause, KafkaError):
            return InternalError(f"{doing}: {error}")
        error = cause
    code = error.code()
    if code in _MISSING and topic is not None:
        return missing_topic(topic)
    if (missing := missing_right(error, group, topic if operation else None, operation or "")) is not None:
        return Forbidden(f"{doing}: {missing}")
    if code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE):
        return TooLarge(f"{doing}: the broker's message.max.bytes does not allow a record of this size")
    if code in _AWAY or code in _MISSING or error.retriable() or error.fatal():
        return BrokerUnavailable(f"{doing}: {error.str()}", retry_after_s=1.0)
    return InternalError(f"{doing}: {error.name()} {error.str()}")
