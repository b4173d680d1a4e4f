"""Records on their way out: which topic, key and headers a request or a command gets. Pure but for new trace ids."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from urllib.parse import quote

from penstock.schemas.codec import Codec
from penstock.schemas.desired import key_of
from penstock.schemas.records import (
    AuditEvent,
    ControlCommand,
    ConversationFacts,
    DesiredState,
    InferenceRequest,
    KeyClaim,
    KeyState,
    Record,
    UsageTotal,
)
from penstock.schemas.topics import (
    HEADER_CONTENT_TYPE,
    HEADER_KEY_ID,
    HEADER_TRACEPARENT,
    TopicNames,
    conversation_key,
    request_key,
)

_CONTENT_TYPE = (HEADER_CONTENT_TYPE, b"application/avro")
_SPEC_VERSION = ("ce_specversion", b"1.0")
# W3C Trace Context, version 00; a later version may have more behind the flags.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """What `Transport.send` takes."""

    topic: str
    key: bytes
    value: bytes
    headers: list[tuple[str, bytes]]


def is_traceparent(given: str) -> bool:
    """Whether it is well-formed, as W3C Trace Context has it."""
    match = None if len(given) > 256 else _TRACEPARENT.fullmatch(given)
    return match is not None and (match[1] is None or not given.startswith("00"))


def valid_traceparent(given: str | None) -> str:
    """The trace that a caller is in, as W3C Trace Context writes it; a new one when that is not well-formed."""
    if given is not None and is_traceparent(given):
        return given
    # Ids must differ, not be secret; the bit that is always set keeps them from being 0, which is no id.
    return f"00-{random.getrandbits(128) | 1:032x}-{random.getrandbits(64) | 1:016x}-01"


def request_record(
    request: InferenceRequest,
    names: TopicNames,
    codec: Codec,
    *,
    source: str,
    traceparent: str | None = None,
    key_id: str | None = None,
) -> Outgoing:
    """A request as a record with CloudEvents headers; `source` names who sends it, `key_id` the key it came with."""
    headers = _headers("InferenceRequest", request.request_id, source)
    if traceparent is not None:
        headers.append((HEADER_TRACEPARENT, traceparent.encode()))
    if key_id is not None:
        headers.append((HEADER_KEY_ID, key_id.encode()))
    return Outgoing(
        topic=names.request(request.task, request.priority, request.pool),
        key=request_key(request),
        value=codec.encode(request),
        headers=headers,
    )


def control_record(command: ControlCommand, names: TopicNames, codec: Codec, *, source: str = "penstock") -> Outgoing:
    """A command as a record; a later one of the same kind for the same request or conversation replaces it."""
    subject = command.request_id
    if command.kind == "delete_conversation":
        subject = conversation_key(command.tenant, command.conversation_id or "")
    identity = f"{subject}/{command.kind}"
    return _replacing(command, identity, names.control, codec, source)


def desired_record(state: DesiredState, names: TopicNames, codec: Codec, *, source: str = "penstock") -> Outgoing:
    """The desired state of a model or class as a record; it replaces the former one."""
    identity = key_of(state)
    return _replacing(state, identity, names.desired, codec, source)


def facts_record(facts: ConversationFacts, names: TopicNames, codec: Codec, *, source: str = "penstock") -> Outgoing:
    """The facts of a conversation as a record; it replaces the former one."""
    identity = conversation_key(facts.tenant, facts.conversation_id)
    return _replacing(facts, identity, names.conversation_facts, codec, source)


def claim_record(claim: KeyClaim, names: TopicNames, codec: Codec, *, source: str) -> Outgoing:
    """A claim as a record. All claims of one key are on one partition: their order decides."""
    return _replacing(claim, claim.request_id, names.idempotency, codec, source)


def key_record(state: KeyState, names: TopicNames, codec: Codec, *, source: str) -> Outgoing:
    """The state of a key, its revocation or the limits of a tenant as a record; it replaces the former one."""
    identity = f"{state.kind}/{state.id}"
    return _replacing(state, identity, names.key, codec, source)


def audit_record(event: AuditEvent, names: TopicNames, codec: Codec, *, source: str) -> Outgoing:
    """An action of an operator as a record."""
    return _replacing(event, event.id, names.audit, codec, source)


def usage_record(total: UsageTotal, names: TopicNames, codec: Codec, *, source: str = "penstock") -> Outgoing:
    """A total of usage as a record; it replaces the former one of the same day, tenant, model and key."""
    identity = "/".join(quote(part or "", safe="") for part in (total.day, total.tenant, total.model, total.key_id))
    return _replacing(total, identity, names.usage, codec, source)


def _replacing(value: Record, identity: str, topic: str, codec: Codec, source: str) -> Outgoing:
    """A record whose key is what it is about: on a compacted topic it replaces the former one."""
    headers = _headers(type(value).__name__, identity, source)
    return Outgoing(topic=topic, key=identity.encode(), value=codec.encode(value), headers=headers)


def _headers(kind: str, identity: str, source: str) -> list[tuple[str, bytes]]:
    """What the value is, and CloudEvents in binary mode."""
    return [
        _CONTENT_TYPE,
        _SPEC_VERSION,
        ("ce_id", identity.encode()),
        ("ce_source", source.encode()),
        ("ce_type", f"penstock.v1.{kind}".encode()),
    ]
