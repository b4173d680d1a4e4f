"""Records commands that change Kafka directly among the actions of operators, as gateways do with theirs."""

from __future__ import annotations

import getpass
import json
import socket
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import typer

from penstock.common.admin import partition_counts
from penstock.common.clock import now_ms
from penstock.common.kafka_errors import missing_topic
from penstock.common.outgoing import audit_record
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Delivery, Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError
from penstock.schemas.records import AuditEvent

DELIVERY_S = 10


@contextmanager
def audited(kafka: KafkaSettings, action: str, parameters: Mapping[str, Any]) -> Generator[None]:
    """Around a command: it is recorded before it is done, and with its outcome.

    One that cannot be recorded is done all the same, with a warning: any Kafka tool can do it without a record, and
    the command may be what mends the topic.
    """
    event = AuditEvent(
        id=str(uuid.uuid4()),
        at=now_ms(),
        action=action,
        parameters=json.dumps({name: value for name, value in parameters.items() if value}),
        user=_user(),
        address=socket.gethostname(),
    )
    with _writer(kafka) as write:
        try:
            write(event)
        except PenstockError as error:
            if not isinstance(error, NotFound):  # as before the first `topics create`
                typer.echo(f"not recorded on {kafka.names.audit}: {error.message}", err=True)
            yield
            return
        status = 1
        try:
            yield
            status = 0
        finally:
            with suppress(PenstockError):
                write(replace(event, status=status))


@contextmanager
def _writer(kafka: KafkaSettings) -> Generator[Callable[[AuditEvent], None]]:
    """What writes an event and waits for the broker. It raises what the delivery failed with."""
    transport, codec = Transport(kafka, delivery_timeout_s=DELIVERY_S), default_codec()

    def write(event: AuditEvent) -> None:
        if kafka.names.audit not in partition_counts(kafka, [kafka.names.audit]):
            raise missing_topic(kafka.names.audit)
        record, done = audit_record(event, kafka.names, codec, source="penstock"), list[Delivery]()
        transport.send(
            record.topic, record.value, key=record.key, headers=record.headers, partition=0, on_delivery=done.append
        )
        transport.flush(2 * DELIVERY_S)
        error = done[0].error if done else BrokerUnavailable("the broker does not answer")
        if error is not None:
            raise error

    try:
        yield write
    finally:
        transport.close()


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return None
