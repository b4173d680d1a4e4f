"""Records on their way out: which topic, key and headers a request or a command gets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schemas.codec import Codec
from penstock.schemas.records import ControlCommand, InferenceRequest
from penstock.schemas.topics import HEADER_CONTENT_TYPE, HEADER_TRACEPARENT, TopicNames, request_key

_CONTENT_TYPE = (HEADER_CONTENT_TYPE, b"application/avro")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outgoing:
    """What `Transport.send` takes."""

    topic: str
    key: bytes
    value: bytes
    headers: list[tuple[str, bytes]]


def request_record(
    request: InferenceRequest, names: TopicNames, codec: Codec, *, source: str, traceparent: str | None = None
) -> Outgoing:
    """A request as a record with CloudEvents headers; `source` names who sends it."""
    headers = [
        _CONTENT_TYPE,
        ("ce_specversion", b"1.0"),
        ("ce_id", request.request_id.encode()),
        ("ce_source", source.encode()),
        ("ce_type", b"penstock.v1.InferenceRequest"),
    ]
    if traceparent is not None:
        headers.append((HEADER_TRACEPARENT, traceparent.encode()))
    return Outgoing(
        topic=names.request(request.task, request.priority, request.pool),
        key=request_key(request),
        value=codec.encode(request),
        headers=headers,
    )


def control_record(command: ControlCommand, names: TopicNames, codec: Codec) -> Outgoing:
    """A command as a record; a later one of the same kind for the same request replaces it."""
    return Outgoing(
        topic=names.control,
        key=f"{command.request_id}/{command.kind}".encode(),
        value=codec.encode(command),
        headers=[_CONTENT_TYPE],
    )
