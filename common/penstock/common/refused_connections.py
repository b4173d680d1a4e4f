"""Why brokers refuse the connections of a client: librdkafka's words as an error that names the setting to correct."""

from __future__ import annotations

import os
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from confluent_kafka import KafkaError

from penstock.common.certificates import certificate_validity
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerRefused

PROBE_S, PROBE_LEAST_S = 2.0, 1.0
RECENT_S = 15.0
"""librdkafka reports a refusal when it happens: it asks for a token again after 10 s."""


class Refusal(NamedTuple):
    """What is wrong, and what is to be corrected: a name under `[kafka] security`, or `SERVERS`."""

    setting: str
    text: str


PROTOCOL, CA, CERTIFICATE = "security.protocol", "ssl.ca.location", "ssl.certificate.location"
SERVERS = "kafka.bootstrap_servers"
_UNVERIFIED = "the broker's certificate cannot be verified"
_ALL_DOWN = KafkaError._ALL_BROKERS_DOWN  # pyright: ignore[reportPrivateUsage]
_EXPIRED = 10
_OTHER_HOST = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH."""

# What librdkafka 2.16 says; the first that matches counts.
_RULES = tuple(
    (re.compile(pattern), setting, text)
    for pattern, setting, text in (
        (
            r"OAUTHBEARER token: (.*(?:invalid_client|unauthorized_client|HTTP.{0,20} 40[0-3]).*)",
            "sasl.oauthbearer.client.secret",
            "the token endpoint refuses the client: {}",
        ),
        (
            r"OAUTHBEARER token: (.*)",
            "sasl.oauthbearer.token.endpoint.url",
            "the token endpoint issues no token: {}",
        ),
        (r"handshake failed: .*supported mechanisms: (\S+)", "sasl.mechanism", "the listener takes {} alone"),
        (r"handshake failed: .*supported mechanisms: ()", PROTOCOL, "the listener has no SASL"),
        (r"SASL authentication error: (.*invalid_token.*)", "sasl.oauthbearer.client.id", "the token is refused: {}"),
        (r"SASL authentication error: (.*)", "sasl.password", "the user or the password is wrong: {}"),
        (r"()connecting to a PLAINTEXT broker listener", PROTOCOL, "the listener has no TLS"),
        (r"()connecting to a SSL listener", PROTOCOL, "the listener has TLS"),
        (r"alert ()certificate required", CERTIFICATE, "the listener requires a client certificate that it trusts"),
        (
            r"alert ((?:bad|unsupported|unknown) c\w+|certificate \w+)",
            CERTIFICATE,
            "the client certificate is refused: {}",
        ),
        (r"()certificate verify failed", CA, _UNVERIFIED),
    )
)


def refusal(text: str) -> Refusal | None:
    """What a line of librdkafka's log, or the text of its error, says of a refusal."""
    text = text.rsplit(" (after ", 1)[0]
    for pattern, setting, meaning in _RULES:
        if (found := pattern.search(text)) is not None:
            return Refusal(setting, meaning.format(found[1]))
    return None


def setting_name(setting: str) -> str:
    """As it is written in penstock.toml."""
    return SERVERS if setting == SERVERS else f'kafka.security."{setting}"'


class HeardErrors:
    """The errors that one client of librdkafka reports to its `error_cb`, which is `note`."""

    def __init__(self) -> None:
        self._errors: deque[tuple[float, KafkaError]] = deque(maxlen=50)
        self.answered = False
        """A broker has answered with these settings: the protocol is right."""

    def note(self, error: KafkaError) -> None:
        self._errors.append((time.monotonic(), error))

    def refused(self, settings: KafkaSettings, give_up: float) -> BrokerRefused | None:
        """The recent refusal, if any. Where librdkafka does not say what is wrong it blocks, until `give_up`
        (monotonic), for between `PROBE_LEAST_S` and `PROBE_S`.
        """
        give_up = time.monotonic() + min(PROBE_S, max(PROBE_LEAST_S, give_up - time.monotonic()))
        recent = [error for at, error in list(self._errors) if time.monotonic() - at < RECENT_S]
        found = next((one for error in reversed(recent) if (one := refusal(error.str())) is not None), None)
        if found is not None and found.text == _UNVERIFIED:
            found = _tls_refusal(settings, give_up) or found
        elif found is not None and found.setting == CERTIFICATE:
            found = _expired_certificate(settings.security) or found
        elif {error.code() for error in recent} == {_ALL_DOWN} and not (self.answered or _has_tls(settings)):
            # Connections are made and end at once; one that is refused or breaks would be an error of its own.
            found = _tls_refusal(settings, give_up)
        if found is None:
            return None
        name = setting_name(found.setting)
        text = f"Kafka at {settings.bootstrap_servers} refuses this client: {found.text}; check {name}"
        return BrokerRefused(text, param=name, retry_after_s=1.0)


def _has_tls(settings: KafkaSettings) -> bool:
    return settings.security.get(PROTOCOL, "PLAINTEXT").upper().endswith("SSL")


def _tls_refusal(settings: KafkaSettings, give_up: float) -> Refusal | None:
    """What a TLS handshake by Python's own client finds: librdkafka does not say why a certificate is not valid."""
    for server in settings.bootstrap_servers.split(","):
        address = urlsplit("//" + server.strip().rpartition("://")[2])
        host = address.hostname or ""
        with suppress(OSError, ValueError):
            with socket.create_connection((host, address.port or 9092), _left_s(give_up)) as plain:
                plain.settimeout(_left_s(give_up))
                found = _handshake(plain, host, settings)
            if found is not None:
                return found
    return None


def _left_s(give_up: float) -> float:
    return max(0.01, give_up - time.monotonic())


def _handshake(plain: socket.socket, host: str, settings: KafkaSettings) -> Refusal | None:
    has_tls = _has_tls(settings)
    try:
        context = ssl.create_default_context(
            cafile=settings.security.get(CA), cadata=settings.security.get("ssl.ca.pem")
        )
        context.wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        if has_tls and error.verify_code == _EXPIRED:
            return Refusal(SERVERS, f"the broker's certificate has expired ({host})")
        if has_tls and error.verify_code in _OTHER_HOST:
            return Refusal(SERVERS, f"the broker's certificate is not for the host name {host}")
        if has_tls:
            return Refusal(CA, f"{_UNVERIFIED}: {error.verify_message}")
    except OSError:
        if has_tls or settings.security.get(PROTOCOL, "PLAINTEXT").upper() != "PLAINTEXT":
            return None
        return Refusal(PROTOCOL, "it closes connections, perhaps because the listener has SASL")
    return None if has_tls else Refusal(PROTOCOL, "the listener has TLS")


def _expired_certificate(security: Mapping[str, str]) -> Refusal | None:
    """A broker written in Java does not say that a client certificate has expired."""
    valid = certificate_validity(Path(security.get(CERTIFICATE, os.devnull)))
    if valid is None or valid.ends_s >= time.time():
        return None
    ends = time.strftime("%d %b %Y %H:%M", time.gmtime(valid.ends_s))
    return Refusal(CERTIFICATE, f"the client certificate has expired on {ends} GMT")
