"""Records on their way out: which topic, key and headers a request or a command gets. Pure but for new trace ids."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from penstock.schemas.codec import Codec
from penstock.schemas.desired import key_of
from penstock.schemas.records import ControlCommand, ConversationFacts, DesiredState, InferenceRequest, KeyClaim
from penstock.schemas.topics import (
    HEADER_CONTENT_TYPE,
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


def valid_traceparent(given: str | None) -> str:
    """The trace that a caller is in, as W3C Trace Context writes it; a new one when that is not well-formed."""
    match = None if given is None or len(given) > 256 else _TRACEPARENT.fullmatch(given)
    if match is not None and (match[1] is None or not match[0].startswith("00")):
        return match[0]
    # Ids must differ, not be secret; the bit that is always set keeps them from being 0, which is no id.
    return f"00-{random.getrandbits(128) | 1:032x}-{random.getrandbits(64) | 1:016x}-01"


def request_record(
    request: InferenceRequest, names: TopicNames, codec: Codec, *, source: str, traceparent: str | None = None
) -> Outgoing:
    """A request as a record with CloudEvents headers; `source` names who sends it."""
    headers = _headers("InferenceRequest", request.request_id, source)
    if traceparent is not None:
        headers.append((HEADER_TRACEPARENT, traceparent.encode()))
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
    return Outgoing(
        topic=names.control,
        key=identity.encode(),
        value=codec.encode(command),
        headers=_headers("ControlCommand", identity, source),
    )


def desired_record(state: DesiredState, names: TopicNames, codec: Codec, *, source: str = "penstock") -> Outgoing:
    """The desired state of a model or class as a record; it replaces the former one."""
    identity = key_of(state)
    return Outgoing(
        topic=names.desired,
        key=identity.encode(),
        value=codec.encode(state),
        headers=_headers("DesiredState", identity, source),
    )


def facts_record(facts: ConversationFacts, names: TopicNames, codec: Codec, *, source: str = "penstock") -> Outgoing:
    """The facts of a conversation as a record; it replaces the former one."""
    identity = conversation_key(facts.tenant, facts.conversation_id)
    return Outgoing(
        topic=names.conversation_facts,
        key=identity.encode(),
        value=codec.encode(facts),
        headers=_headers("ConversationFacts", identity, source),
    )


def claim_record(claim: KeyClaim, names: TopicNames, codec: Codec, *, source: str) -> Outgoing:
    """A claim as a record. All claims of one key are on one partition: their order decides."""
    return Outgoing(
        topic=names.idempotency,
        key=claim.request_id.encode(),
        value=codec.encode(claim),
        headers=_headers("KeyClaim", claim.request_id, source),
    )


def _headers(kind: str, identity: str, source: str) -> list[tuple[str, bytes]]:
    """What the value is, and CloudEvents in binary mode."""
    return [
        _CONTENT_TYPE,
        _SPEC_VERSION,
        ("ce_id", identity.encode()),
        ("ce_source", source.encode()),
        ("ce_type", f"penstock.v1.{kind}".encode()),
    ]
