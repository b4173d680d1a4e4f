"""Actions of operators on `inference.audit`: each is written before it is done, and again with its outcome."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast
from urllib.parse import parse_qsl

from starlette.types import Scope

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.kafka_errors import missing_topic, unavailable
from penstock.common.outgoing import audit_record
from penstock.common.reader import RawMessage, make_consumer, read_with
from penstock.common.settings import KafkaSettings
from penstock.common.threads import in_daemon_thread
from penstock.common.transport import AsyncTransport
from penstock.gateway.edge.rules import Rules
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.dependencies import Problem
from penstock.gateway.service.submitting import SOURCE
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, DecodeError, NotFound, PenstockError
from penstock.schemas.finite_json import loads_any
from penstock.schemas.records import AuditEvent
from penstock.schemas.texts import encodable, names_secret, without_user
from penstock.schemas.times import rfc3339

logger = logging.getLogger(__name__)

MOST_PARAMETERS = 4_000
"""Characters of the parameters of one action."""
MOST_ITEMS = 100
MASK = "***"
MOST_TEXT = 200
"""Characters of one text in them: ids and names, not prompts."""
CHUNK = 500
"""Records that are read at once, and records behind a page that are searched for outcomes."""
MOST_READ = 20_000
"""Records that one page may cost. A page of a filter that matches few of them is shorter, and others follow it."""
READ_S = 10.0
Found = list[tuple[int, AuditEvent]]


class AuditLog:
    """An installation without the topic (of an older release) is not audited: `probe` reports it. In all others an
    action that cannot be written is not done.
    """

    def __init__(self, transport: AsyncTransport, kafka: KafkaSettings, codec: Codec) -> None:
        self._transport, self._kafka, self._codec = transport, kafka, codec

    async def begin(self, event: AuditEvent) -> None:
        """Returns once the broker has it. Raises BrokerUnavailable."""
        try:
            await self._write(event)
        except PenstockError as error:
            if isinstance(error, NotFound) and await self.look() is not None:
                logger.warning("audit.not_written action=%s reason=%s", event.action, error.message)
                return
            reason = f"nothing was done, because it cannot be recorded: {error.message}"
            raise BrokerUnavailable(reason, retry_after_s=1) from error

    async def end(self, event: AuditEvent, status: int) -> None:
        """The action has been answered with this status: a failure to write that is logged."""
        try:
            await self._write(dataclasses.replace(event, status=status))
        except PenstockError as failure:
            logger.warning("audit.not_written action=%s status=%d reason=%s", event.action, status, failure.code)

    async def _write(self, event: AuditEvent) -> None:
        record = audit_record(event, self._kafka.names, self._codec, source=SOURCE)
        await self._transport.produce(record.topic, record.value, key=record.key, headers=record.headers, partition=0)

    def read(
        self, before: int | None, limit: int, since_ms: int | None, wanted: Callable[[AuditEvent], bool]
    ) -> tuple[Found, int | None]:
        """Up to `limit` actions with the offsets of their first records, newest first; blocks.

        `before`: only those in front of this offset. Second is the `before` of those that follow, None if none do.
        Raises BrokerUnavailable, also when the topic is missing.
        """
        self.check_topic()
        tp, give_up = (self._kafka.names.audit, 0), time.monotonic() + READ_S
        first, end = (look(self._kafka, [tp], READ_S)[tp] for look in (admin.begin_offsets, admin.end_offsets))
        if since_ms is not None:
            first = admin.offsets_at(self._kafka, [tp], since_ms, READ_S)[tp]
        stop = end if before is None else min(before, end)
        outcomes: dict[str, AuditEvent] = {}
        found: Found = []
        at, least = min(stop + CHUNK, end), max(first, stop - MOST_READ)
        consumer = make_consumer(self._kafka)
        try:
            while at > least and len(found) <= limit:
                begin = max(least, at - CHUNK)
                for message in reversed(read_with(consumer, {tp: (begin, at)}, give_up)):
                    event = self._decoded(message)
                    if event is None:
                        continue
                    if event.status is not None:
                        outcomes.setdefault(event.id, event)
                    elif message.offset < stop and wanted(event):
                        found.append((message.offset, outcomes.get(event.id, event)))
                at = begin
        finally:
            consumer.close()
        if len(found) > limit:
            return found[:limit], found[limit - 1][0]
        return found, at if at > first else None

    async def look(self) -> Problem | None:
        """A probe: whether the topic exists."""
        try:
            await in_daemon_thread(self.check_topic)
        except PenstockError as error:
            return Problem("actions of operators are not recorded", error.message)
        return None

    def check_topic(self) -> None:
        """Blocks. Raises BrokerUnavailable, also when the topic is missing."""
        topic = self._kafka.names.audit
        if topic not in admin.partition_counts(self._kafka, [topic], READ_S):
            raise unavailable(missing_topic(topic))

    def _decoded(self, message: RawMessage) -> AuditEvent | None:
        try:
            return self._codec.decode(message.value or b"", AuditEvent)
        except DecodeError:
            return None


def audit_event(scope: Scope, rules: Rules, caller: Caller, body: bytes) -> AuditEvent:
    """What a caller asks for with this exchange."""
    client = scope.get("client")
    return AuditEvent(
        id=str(uuid.uuid4()),
        at=now_ms(),
        action=f"{scope['method']} {rules.path}",
        target=scope["path"],
        parameters=_parameters(scope, body),
        key_id=caller.key_id,
        key_name=caller.key_name,
        tenant=caller.tenant,
        user=caller.user,
        address=client[0] if client else None,
    )


def audit_json(event: AuditEvent, offset: int) -> dict[str, Any]:
    """An action as operators see it."""
    shown = {name: value for name, value in event.to_dict().items() if name not in ("at", "parameters")}
    return {
        "object": "audit_event",
        **{name: encodable(value) if isinstance(value, str) else value for name, value in shown.items()},
        "at": rfc3339(event.at),
        "parameters": _read_parameters(event.parameters),
        "offset": offset,
    }


def _parameters(scope: Scope, body: bytes) -> str | None:
    """Query and body as JSON without secrets; None if there are none."""
    query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1")))
    try:
        given = loads_any(body) if body else None
    except ValueError:  # the route refuses it
        given = None
    parameters = _without_secrets({name: value for name, value in (("query", query), ("body", given)) if value})
    if not parameters:
        return None
    text = json.dumps(parameters, separators=(",", ":"))
    return text if len(text) <= MOST_PARAMETERS else json.dumps({"cut": text[:MOST_PARAMETERS]})


def _read_parameters(text: str | None) -> Any:
    """What was recorded, as JSON can hold it: a record may be of another release."""
    try:
        return None if text is None else _without_secrets(loads_any(text), MOST_PARAMETERS)
    except ValueError:
        return {"cut": encodable(text or "")}


def _without_secrets(value: Any, most_text: int = MOST_TEXT) -> Any:
    """The same as JSON and UTF-8 can hold it, with masks and cuts."""
    if isinstance(value, Mapping):
        given = cast("Mapping[str, Any]", value).items()
        return {
            encodable(name): MASK if _is_hidden(name, one) else _without_secrets(one, most_text) for name, one in given
        }
    if isinstance(value, list):
        items = cast("list[Any]", value)
        left_out = len(items) - MOST_ITEMS if len(items) > MOST_ITEMS + 1 else 0
        kept = [_without_secrets(one, most_text) for one in items[: len(items) - left_out]]
        return [*kept, f"… {left_out} more"] if left_out else kept
    if isinstance(value, str):
        return without_user(encodable(value)[:most_text])
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_hidden(name: str, value: Any) -> bool:
    return value is not None and (names_secret(name) or name in ("headers", "env"))
