"""What a receiver is sent: the request as `GET /v1/requests/{id}` shows it, signed by the Standard Webhooks library."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from standardwebhooks import Webhook

from penstock.common.reader import RawMessage
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.outputs import json_bytes
from penstock.gateway.view.request_records import read_request
from penstock.schemas.codec import Codec
from penstock.schemas.errors import PenstockError, RegistryUnavailable
from penstock.schemas.records import Place, ResultEvent, StatusEvent
from penstock.schemas.times import rfc3339

_NAMESPACE = uuid.UUID("6f0a2c7e-9d0b-5f0e-8a53-0d9f6f3c4b11")
AGENT = b"penstock-webhooks/1"


def type_of(event: ResultEvent | StatusEvent) -> str:
    return f"request.{event.status or 'failed'}"


def webhook_id(event: ResultEvent | StatusEvent) -> str:
    """The same for every attempt, by whichever process; another one for a later request with the same id."""
    origin = event.origin
    place = f"{origin.topic}/{origin.partition}/{origin.offset}/{origin.append_time_ms}"
    if isinstance(event, StatusEvent):
        place += f"/{event.epoch}/{event.attempt}/{event.status}"
    return f"msg_{uuid.uuid5(_NAMESPACE, f'{event.tenant}/{event.request_id}/{place}').hex}"


def webhook_body(place: Place, event: ResultEvent | StatusEvent, request: RawMessage | None, codec: Codec) -> bytes:
    """`place` is the event's. `request` is its record, None if that is not on its topic any more: what only it says is
    null then.

    Raises RegistryUnavailable.
    """
    entry = Entry(event.tenant, event.request_id, place.partition)
    entry.accepted_ms = event.origin.append_time_ms
    try:
        asked = None if request is None else read_request(request, codec)
    except RegistryUnavailable:
        raise
    except PenstockError:
        asked = None  # it is no valid request, and its outcome says so
    if asked is not None and (asked.tenant, asked.request_id) == entry.key:
        entry.on_request(asked, event.origin)
    if isinstance(event, StatusEvent):
        entry.on_status(event, listened=False)
    else:
        entry.metadata = event.metadata
        entry.on_result(event, place.offset)
    body = {"type": type_of(event), "timestamp": rfc3339(event.created_at), "data": entry.to_json()}
    try:
        return json_bytes(body)
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def signed_headers(webhook: str, body: bytes, secrets: Sequence[str], now_ms: int) -> list[tuple[bytes, bytes]]:
    """The standard's headers, with one signature for each secret."""
    at = datetime.fromtimestamp(now_ms // 1000, UTC)
    signatures = " ".join(Webhook(secret).sign(webhook, at, body.decode()) for secret in secrets)
    return [
        (b"Content-Type", b"application/json"),
        (b"User-Agent", AGENT),
        (b"webhook-id", webhook.encode()),
        (b"webhook-timestamp", str(now_ms // 1000).encode()),
        (b"webhook-signature", signatures.encode()),
    ]
