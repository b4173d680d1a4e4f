"""Kafka's errors as ours: what passes by itself is waited for and fails no request."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from penstock.producers.kafka_errors import from_kafka
from penstock.schemas.errors import BrokerUnavailable


@pytest.mark.parametrize("name", ["_DESTROY_BROKER", "_DESTROY", "_TRANSPORT", "_TIMED_OUT", "NOT_CONTROLLER"])
def test_a_broker_that_comes_back_is_waited_for(name: str) -> None:
    assert isinstance(from_kafka(KafkaError(getattr(KafkaError, name)), "ask"), BrokerUnavailable)
