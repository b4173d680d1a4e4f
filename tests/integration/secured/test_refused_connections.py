"""A refused connection is one error that names the setting to correct, within seconds."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from kit.certificates import Authority
from kit.secured_kafka import SecuredKafka
from penstock.common.admin import partition_counts
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerRefused, InvalidRequest, PenstockError

Security = dict[str, str]
Case = tuple[str, Callable[[SecuredKafka, Authority], Security], str, str]


def scram(kafka: SecuredKafka, listener: str = "sasltls", **changed: str) -> Security:
    return kafka.security(listener, "SCRAM-SHA-512") | {f"sasl.{name}": value for name, value in changed.items()}


def oauth(kafka: SecuredKafka, **changed: str) -> Security:
    changes = {f"sasl.oauthbearer.{name.replace('_', '.')}": value for name, value in changed.items()}
    return kafka.security("sasltls", "OAUTHBEARER") | changes


def certified(kafka: SecuredKafka, authority: Authority, lifetime: timedelta) -> Security:
    pair = authority.issue("penstock", lifetime=lifetime, file="other")
    files = {"ssl.certificate.location": str(pair.certificate), "ssl.key.location": str(pair.key)}
    return kafka.security("mtls") | files


DAY = timedelta(days=1)
REFUSED: list[Case] = [
    ("sasltls", lambda kafka, _: scram(kafka, password="wrong"), "sasl.password", "invalid credentials"),
    ("sasltls", lambda kafka, _: scram(kafka, username="nobody"), "sasl.password", "invalid credentials"),
    ("sasl", lambda kafka, _: scram(kafka, "sasl", mechanism="SCRAM-SHA-256"), "sasl.mechanism", "PLAIN,SCRAM-SHA-512"),
    ("sasltls", lambda kafka, _: oauth(kafka, client_secret="wrong"), "sasl.oauthbearer.client.secret", "wrong secret"),
    (
        "sasltls",
        lambda kafka, _: oauth(kafka, token_endpoint_url="http://127.0.0.1:1/token"),
        "sasl.oauthbearer.token.endpoint.url",
        "Could not connect",
    ),
    (
        "expired",
        lambda kafka, _: kafka.security("expired"),
        "bootstrap_servers",
        "certificate has expired",
    ),
    (
        "tls",
        lambda kafka, other: kafka.security("tls") | {"ssl.ca.location": str(other.certificate)},
        "ssl.ca.location",
        "unable to get local issuer",
    ),
    ("tls by address", lambda kafka, _: kafka.security("tls"), "bootstrap_servers", "host name 127.0.0.1"),
    ("tls", lambda kafka, _: {}, "security.protocol", "the listener has TLS"),
    ("sasltls", lambda kafka, _: kafka.security("sasl", "PLAIN"), "security.protocol", "the listener has TLS"),
    ("sasl", lambda kafka, _: {}, "security.protocol", "perhaps because the listener has SASL"),
    ("sasl", lambda kafka, _: kafka.security("tls"), "security.protocol", "the listener has no TLS"),
    ("tls", lambda kafka, _: kafka.security("sasltls", "PLAIN"), "security.protocol", "the listener has no SASL"),
    ("mtls", lambda kafka, _: kafka.security("tls"), "ssl.certificate.location", "requires a client certificate"),
    (
        "mtls",
        lambda kafka, _: certified(kafka, kafka.authority, -DAY),
        "ssl.certificate.location",
        "the client certificate has expired on",
    ),
    ("mtls", lambda kafka, other: certified(kafka, other, DAY), "ssl.certificate.location", "requires a client"),
]
WRONG: list[Case] = [
    ("sasl", lambda kafka, _: scram(kafka, "sasl", mechanism="SCRUM"), "", "Unsupported SASL mechanism: SCRUM"),
    ("sasl", lambda kafka, _: {"sasl.mechanim": "PLAIN"}, "sasl.mechanim", "No such configuration property"),
    ("tls", lambda kafka, _: {"security.protocol": "SSL", "ssl.ca.location": "/no"}, "ssl.ca.location", "failed"),
    (
        "mtls",
        lambda kafka, other: kafka.security("mtls") | {"ssl.key.location": str(other.issue("other").key)},
        "ssl.key.location",
        "mismatch",
    ),
]


@pytest.mark.parametrize(("listener", "make", "setting", "text"), [*REFUSED, *WRONG])
def test_the_error_names_the_setting(
    secured: SecuredKafka,
    tmp_path: Path,
    listener: str,
    make: Callable[[SecuredKafka, Authority], Security],
    setting: str,
    text: str,
) -> None:
    name, _, by_address = listener.partition(" ")
    servers = secured.at(name).replace("localhost", "127.0.0.1" if by_address else "localhost")
    security = make(secured, Authority(tmp_path, "other"))
    kafka = KafkaSettings(bootstrap_servers=servers, security=security)
    refused = (listener, make, setting, text) in REFUSED
    with pytest.raises(BrokerRefused if refused else InvalidRequest) as caught:
        partition_counts(kafka, timeout_s=3)
    error: PenstockError = caught.value
    assert text in error.message
    assert error.param is not None
    assert error.param in error.message
    assert setting in error.param
    assert not re.search(r"correct-horse|of-the-client", error.message)
