"""Kafka's errors as ours: what passes by itself is waited for and fails no request."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.common.kafka_errors import from_kafka, translated
from penstock.schemas.errors import BrokerUnavailable, NotFound


@pytest.mark.parametrize(
    "name",
    [
        "_DESTROY_BROKER",
        "_DESTROY",
        "_TRANSPORT",
        "_TIMED_OUT",
        "NOT_CONTROLLER",
        "_NOENT",  # "failed to query partition leaders"
        "_WAIT_CACHE",
        "_BAD_MSG",
        "_UNKNOWN_BROKER",
        "UNKNOWN",
        "STALE_BROKER_EPOCH",
        "INVALID_REPLICATION_FACTOR",
        "UNKNOWN_TOPIC_OR_PART",
    ],
)
def test_a_broker_that_comes_back_is_waited_for(name: str) -> None:
    assert isinstance(from_kafka(KafkaError(getattr(KafkaError, name)), "ask"), BrokerUnavailable)


def test_what_kafka_raises_is_translated() -> None:
    for raised in (KafkaException(KafkaError(KafkaError._TRANSPORT)), TimeoutError()):
        with pytest.raises(BrokerUnavailable) as refused, translated("ask"):
            raise raised
        assert refused.value.retry_after_s == 1.0
    with pytest.raises(NotFound), translated("ask", "t"):
        raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
