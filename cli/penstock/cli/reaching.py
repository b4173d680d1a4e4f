"""Whether a Kafka is there at all, found out within seconds: librdkafka goes on trying for as long as it may."""

from __future__ import annotations

import re
import socket

from penstock.cli.failures import CliFailure, ExitCode
from penstock.common import admin
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerRefused, BrokerUnavailable

CONNECT_S = 2.0
ANSWER_S = 5.0


def require_kafka(settings: KafkaSettings) -> KafkaSettings:
    """The settings, when a broker of theirs answers. Raises CliFailure (unreachable), BrokerRefused within seconds."""
    reason = why_unreachable(settings)
    if reason is not None:
        raise CliFailure(
            f"no Kafka answers at {settings.bootstrap_servers} ({reason}): start one with `penstock up`,"
            " name yours with --bootstrap-servers, or check [kafka] security",
            exit_code=ExitCode.UNREACHABLE,
        )
    return settings


def why_unreachable(settings: KafkaSettings, answer_s: float = ANSWER_S) -> str | None:
    """None when a broker answers; one that accepts has `answer_s` for that. Raises BrokerRefused."""
    reasons: list[str] = []
    for server in settings.bootstrap_servers.split(","):
        host, port = host_and_port(server)
        try:
            socket.create_connection((host, port), CONNECT_S).close()
        except OSError as error:
            reasons.append(error.strerror or str(error))
        else:
            try:
                admin.broker_count(settings, answer_s)
            except BrokerRefused:
                raise
            except BrokerUnavailable:
                return f"something listens there, but does not speak Kafka to this client within {answer_s:.0f} s"
            return None
    return reasons[0]


def host_and_port(server: str) -> tuple[str, int]:
    """`kafka:9092`, `SSL://kafka:9092` or `[::1]:9092`; the port is Kafka's own when there is none."""
    parts = re.fullmatch(r"(?:\w+://)?(\[[^\]]*\]|[^:\[\]]*)(?::(\d+))?", server.strip())
    if parts is None:
        raise CliFailure(f"{server!r} is no Kafka address: write host:port", exit_code=ExitCode.USAGE)
    return parts[1].strip("[]"), int(parts[2] or 9092)
