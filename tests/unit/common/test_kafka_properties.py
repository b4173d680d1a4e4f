"""[kafka] security against librdkafka's own list of properties, by the library that confluent-kafka carries."""

from __future__ import annotations

import logging
import time

import pytest
from confluent_kafka import Producer

from penstock.cli.config import is_secret
from penstock.common.kafka_properties import property_names, wrong_properties


@pytest.mark.parametrize(
    ("security", "said"),
    [
        ({"sasl.mechanim": "PLAIN"}, "librdkafka has no property sasl.mechanim; the nearest is sasl.mechanism"),
        ({"ssl.ca.lokation": "x"}, "librdkafka has no property ssl.ca.lokation; the nearest is ssl.ca.location"),
        ({"zzz": "x"}, "librdkafka has no property zzz"),
        ({"security.protocol": "sasl"}, 'Invalid value "sasl" for configuration property "security.protocol"'),
        ({"sasl.mechanism": "SCRUM"}, 'Invalid value "SCRUM" for sasl.mechanism: use one of GSSAPI, PLAIN'),
        ({"socket.timeout.ms": "1"}, 'property "socket.timeout.ms" value 1 is outside allowed range 10..300000'),
        ({"bootstrap.servers": "a:1"}, "bootstrap.servers cannot be set here: set kafka.bootstrap_servers"),
        ({"group.id": "g"}, "group.id cannot be set here: set the group_id of the process's section"),
        ({"acks": "1"}, "acks cannot be set here: Penstock sets it"),
    ],
)
def test_a_wrong_property_is_named_with_what_to_write(security: dict[str, str], said: str) -> None:
    (line,) = wrong_properties(security)
    assert said in line


def test_right_properties_pass() -> None:
    security = {"security.protocol": "sasl_ssl", "sasl.mechanisms": "PLAIN", "ssl.key.pem": "k", "client.rack": "a"}
    assert wrong_properties(security) == []
    assert "hush" not in str(wrong_properties({"ssl.key.pam": "hush"}))


def test_what_librdkafka_redacts_in_its_log_is_a_secret_here() -> None:
    names = [name for name in property_names() if name.startswith(("sasl.", "ssl."))]
    taken = {name: "value" for name in names if not wrong_properties({name: "value"})}
    assert len(taken) > 30
    lines: list[str] = []
    logger = logging.getLogger("test.conf")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())
    producer, give_up = Producer({**taken, "debug": "conf"}, logger=logger), time.monotonic() + 20
    while not any("sasl.password" in line for line in lines) and time.monotonic() < give_up:
        producer.poll(0.1)
    redacted = {line.rpartition(":")[2].split(" = ")[0].strip() for line in lines if "[redacted]" in line}
    assert {"sasl.password", "ssl.key.pem", "sasl.oauthbearer.client.secret", "ssl.key.password"} <= redacted
    # A name and the place of a file are shown: who mends a connection needs them.
    shown = {"sasl.username", "ssl.key.location"}
    assert {name for name in redacted - shown if not is_secret(f"kafka.security.{name}")} == set()
