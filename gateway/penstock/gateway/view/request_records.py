"""A record of a request topic as the request that it is, in Avro or JSON. Pure."""

from __future__ import annotations

from collections.abc import Callable

from penstock.common.reader import RawMessage
from penstock.schemas.codec import Codec
from penstock.schemas.ids import check_request_id, check_tenant, is_derived_id
from penstock.schemas.json_records import json_text
from penstock.schemas.lifetimes import with_header
from penstock.schemas.origins import first_place, made_up_id
from penstock.schemas.records import InferenceRequest, Origin
from penstock.schemas.requests import parse_request_bytes
from penstock.schemas.topics import HEADER_ORIGIN, kind_of_topic

_NOT_KEPT = (
    "text_generation",
    "embedding",
    "image_to_text",
    "image_processing",
    "summarization",
    "conversation_items",
    "extra",
)
"""What was asked for: a view keeps nothing of it. The payloads of images that are drawn say how long that takes."""

Decode = Callable[[bytes], InferenceRequest]


def lean_decoder(codec: Codec) -> Decode:
    """Decodes requests without what was asked for, but those whose id can be asked for again, for its hash."""
    read_id = codec.head(InferenceRequest, "request_id")
    lean = codec.decoder(InferenceRequest, without=_NOT_KEPT)

    def decode(value: bytes) -> InferenceRequest:
        return codec.decode(value, InferenceRequest) if is_derived_id(read_id(value)[0]) else lean(value)

    return decode


def read_request(message: RawMessage, codec: Codec, decode: Decode | None = None) -> InferenceRequest | None:
    """The request, by `decode` if it is given; None where there is none. Raises as `Codec.decode`."""
    value = message.value
    if not value:
        return None
    if (text := json_text(value)) is not None:
        made_up = made_up_id(first_place(message.headers, origin_of(message)))
        request = parse_request_bytes(
            text, request_id=made_up, now_ms=message.timestamp_ms, topic_kind=kind_of_topic(message.topic)
        )
    else:
        request = codec.decode(value, InferenceRequest) if decode is None else decode(value)
        # Workers do not take it under such a name, so nothing would ever end it here.
        check_request_id(request.request_id)
        check_tenant(request.tenant)
    return with_header(request, message.headers, message.timestamp_ms)


def is_moved(message: RawMessage) -> bool:
    """Whether it was published again where it belongs, with the origin of its first record."""
    return any(name == HEADER_ORIGIN for name, _ in message.headers)


def origin_of(message: RawMessage) -> Origin:
    """Where a record stands."""
    return Origin(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        append_time_ms=message.timestamp_ms,
    )
