"""The formats of queues: messages in, answers out. Pure.

llm-d's asynchronous processor has `{"id", "deadline", "payload"}` with a deadline in Unix seconds and an OpenAI body;
its programs in Go write the payload as base64 text, others as an object. An answer has the form of its message:
`{"id", "payload"}` with OpenAI's answer, or `{"id", "error"}` with the reason in words.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.common.clock import now_ms
from penstock.gateway.queues.settings import QueueSection
from penstock.schemas.aliases import identity
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BadJson, InvalidRequest, PenstockError
from penstock.schemas.finite_json import checked_value
from penstock.schemas.ids import derived_request_id, is_request_id
from penstock.schemas.json_records import (
    PayloadForm,
    json_text,
    legible_fields,
    object_in,
    written_object,
)
from penstock.schemas.labels import Labels
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import parse_request_bytes, validate_request
from penstock.schemas.times import moment_ms

Json = dict[str, Any]
BodyKind = Literal["chat", "completion", "embedding"]
ID_CHARACTERS = 512
_KINDS: Mapping[str, BodyKind] = {"messages": "chat", "prompt": "completion", "input": "embedding"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LlmdMessage:
    """A message of llm-d: `deadline_s` in Unix seconds, `body` an OpenAI body, `form` how the payload was written."""

    id: str
    deadline_s: int | None
    body: Json
    kind: BodyKind
    form: PayloadForm


class BadMessage(Exception):
    """A message with an id, so that its sender can get an error."""

    def __init__(self, message_id: str, error: PenstockError) -> None:
        super().__init__(error.message)
        self.message_id = message_id
        self.error = error


def read_llmd(value: bytes) -> LlmdMessage:
    """Raises BadJson for what has no id, so that nobody can get an error; BadMessage for what is wrong otherwise."""
    unread = BadJson("not a JSON object with id, deadline and payload")
    message = object_in(value)
    found_id = (legible_fields(value) or {} if message is None else message).get("id")
    if message is None and found_id is None:
        raise unread
    if not isinstance(found_id, str) or not 0 < len(found_id) <= ID_CHARACTERS or not found_id.isprintable():
        raise BadJson(f"id must be text of 1 to {ID_CHARACTERS} printable characters")
    if message is None:
        raise BadMessage(found_id, unread)
    body, form = written_object(message.get("payload"))
    try:
        if body is None:
            raise InvalidRequest("payload must be a JSON object, or one as text or base64", param="payload")
        if body.get("stream"):
            raise InvalidRequest("payload.stream is not supported in queues: answers are whole", param="payload.stream")
        body = checked_value(body, "payload", "payload")
        deadline_s = _deadline(message.get("deadline"))
        return LlmdMessage(id=found_id, deadline_s=deadline_s, body=body, kind=_kind(body), form=form)
    except InvalidRequest as error:
        raise BadMessage(found_id, error) from None


def request_key(queue: QueueSection, message_id: str, tries: int) -> str:
    """What the request of a message is known by: the same in every bridge, another for each new try."""
    name = f"{queue.topic}\n{message_id}"
    return f"queue/{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}/{tries}"


def answered(message_id: str, form: PayloadForm, answer: Json) -> bytes:
    """What goes to the result topic for an answer in OpenAI's shape."""
    return _dump({"id": message_id, "payload": _written(answer, form)})


def refused(message_id: str, error: PenstockError) -> bytes:
    """What goes to the result topic for a message that has no answer."""
    return _dump({"id": message_id, "error": error.message})


def read_penstock(
    value: bytes, queue: QueueSection, codec: Codec, origin: tuple[str, int, int, int]
) -> InferenceRequest:
    """A request, checked, of the queue's tenant; one without an id gets one that stands for its place in the log.

    `origin`: topic, partition, offset, append time in ms. Raises DecodeError, InvalidRequest and its kin.
    """
    if (text := json_text(value)) is not None:
        return parse_request_bytes(
            text, tenant=queue.tenant, request_id=lambda: derived_request_id(*origin), now_ms=now_ms()
        )
    request = codec.decode(value, InferenceRequest)
    validate_request(request)
    return dataclasses.replace(request, tenant=queue.tenant)


def sender_of(value: bytes | None, origin: tuple[str, int, int, int]) -> tuple[str, Labels] | None:
    """(request id, labels) of a JSON object that is no valid request: its sender hears of it. None for all else."""
    whole = object_in(value or b"")
    body = legible_fields(value) if whole is None else whole
    if body is None:
        return None
    request_id, _, _, labels = identity(body)
    known = isinstance(request_id, str) and is_request_id(request_id)
    if not known and whole is None:
        return None
    return request_id if known else derived_request_id(*origin), labels


def _deadline(given: object) -> int | None:
    """Seconds. llm-d's is text; above all times, as its examples have it, it is the last of them."""
    if given is None or given == "":
        return None
    try:
        return moment_ms(given, bounded=False) // 1000
    except ValueError:
        raise InvalidRequest("deadline must be a time in Unix seconds", param="deadline") from None


def _kind(body: Mapping[str, Any]) -> BodyKind:
    named: list[BodyKind] = [kind for field, kind in _KINDS.items() if field in body]
    if len(named) != 1:
        raise InvalidRequest("payload needs one of messages, prompt and input", param="payload")
    return named[0]


def _written(body: Json, form: PayloadForm) -> Json | str:
    if form == "object":
        return body
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return text if form == "text" else base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _dump(message: Json) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
