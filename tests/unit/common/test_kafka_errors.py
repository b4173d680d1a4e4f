"""Kafka's errors as ours: a temporary error is waited for and fails no request."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.common.kafka_errors import from_kafka, translated
from penstock.schemas.errors import BrokerUnavailable, NotFound

TEMPORARY = (
    "_DESTROY_BROKER _DESTROY _TRANSPORT _TIMED_OUT NOT_CONTROLLER _NOENT _WAIT_CACHE _BAD_MSG _UNKNOWN_BROKER UNKNOWN"
    " STALE_BROKER_EPOCH INVALID_REPLICATION_FACTOR UNKNOWN_TOPIC_OR_PART"
)
"""_NOENT: "failed to query partition leaders"."""


@pytest.mark.parametrize("name", TEMPORARY.split())
def test_a_temporary_error_is_waited_for(name: str) -> None:
    assert isinstance(from_kafka(KafkaError(getattr(KafkaError, name)), "ask"), BrokerUnavailable)


def test_exceptions_are_translated() -> None:
    for raised in (KafkaException(KafkaError(KafkaError._TRANSPORT)), TimeoutError()):
        with pytest.raises(BrokerUnavailable) as refused, translated("ask"):
            raise raised
        assert refused.value.retry_after_s == 1.0
    with pytest.raises(NotFound), translated("ask", "t"):
        raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
