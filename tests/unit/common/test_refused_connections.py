"""What librdkafka says of refused connections, beside what a real broker shows in tests/integration/secured."""

from __future__ import annotations

import logging
import socket
import time

import pytest
from confluent_kafka import KafkaError

from penstock.common.kafka_errors import client_logger
from penstock.common.refused_connections import CERTIFICATE, PROTOCOL, HeardErrors, refusal
from penstock.common.settings import KafkaSettings

WORDS = [
    (
        'SASL authentication error: {"status":"invalid_token"} (after 3ms in state AUTH_REQ)',
        "sasl.oauthbearer.client.id",
    ),
    (
        "SASL OAUTHBEARER mechanism handshake failed: Broker: Unsupported: broker's supported mechanisms: PLAIN",
        "sasl.mechanism",
    ),
    (
        "Disconnected while requesting ApiVersion: might be caused by incorrect security.protocol configuration"
        " (connecting to a SSL listener?)",
        PROTOCOL,
    ),
    (
        "Receive failed: error:0A000416:SSL routines::ssl/tls alert certificate unknown: SSL alert number 46",
        CERTIFICATE,
    ),
    ("Connect to ipv4#127.0.0.1:1 failed: Connection refused (after 0ms in state CONNECT)", None),
    ("Broker: Topic authorization failed", None),
]


@pytest.mark.parametrize(("text", "setting"), WORDS)
def test_the_setting_of_a_refusal(text: str, setting: str | None) -> None:
    found = refusal(text)
    assert (None if found is None else found.setting) == setting


def test_all_clients_of_a_process_log_a_refusal_once_with_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, client_logger.name):
        for client in ("consumer-1", "producer-2"):
            broker = f"FAIL [x#{client}] [thrd:s]: sasl_ssl://h:1/bootstrap"
            client_logger.error(f"{broker}: SASL authentication error: Bad (after {len(client)}ms)")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith('; check kafka.security."sasl.password"')


@pytest.mark.parametrize(("answered", "longest_s"), [(False, 1.8), (True, 0.9)])
def test_a_listener_that_says_nothing_is_probed_within_the_time_that_is_left(answered: bool, longest_s: float) -> None:
    heard = HeardErrors()
    heard.answered = answered
    heard.note(KafkaError(KafkaError._ALL_BROKERS_DOWN))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        settings = KafkaSettings(bootstrap_servers=",".join([f"127.0.0.1:{silent.getsockname()[1]}"] * 3))
        began = time.monotonic()
        heard.refused(settings, began)
        assert time.monotonic() - began < longest_s
        silent.settimeout(0.1)
        if answered:  # nothing has connected
            with pytest.raises(TimeoutError):
                silent.accept()
