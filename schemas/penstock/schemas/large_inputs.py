"""Text of payloads that is too large for a record: it lies in the store of artifacts, and the record refers to it.

A gateway takes it out of the payload before it writes the record. A worker puts it back before the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, cast

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.ids import input_artifact_id
from penstock.schemas.image_payloads import image_references
from penstock.schemas.records import InferenceRequest, InputArtifact

INLINE_BYTES = 256 * 1024
"""The largest text that travels in its record."""
MEDIA_TYPE = "application/json"
STAND_INS: dict[str, dict[str, Any]] = {
    "text_generation": {"prompt": "x"},
    "embedding": {"input": ["x"]},
    "summarization": {"text": "x"},
}
"""The tasks whose text may lie in the store, each with what makes the rest of its payload a valid one."""
_TEXTS = ("messages", "prompt", "prompt_token_ids", "input", "input_token_ids", "text")
_MOST_BYTES_OF_A_CHARACTER = 6
"""Of one in JSON, as `\\u0001`."""


def take_text(request: InferenceRequest) -> tuple[InferenceRequest, bytes | None]:
    """The request without its text, and the text as JSON; the request as it is, and None, if the record can carry it.

    Turns of conversations and texts with images stay as they are. The id of the artifact follows from tenant and text.
    """
    payload = request.payload
    if request.task not in STAND_INS or request.conversation_id is not None or _characters(payload) < _AT_LEAST:
        return request, None
    if next(image_references(payload), None) is not None:
        return request, None
    texts = {name: payload[name] for name in _TEXTS if payload.get(name)}
    data = json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode()
    if len(data) <= INLINE_BYTES:
        return request, None
    sha256 = hashlib.sha256(data).hexdigest()
    reference = InputArtifact(
        artifact_id=input_artifact_id(request.tenant, sha256), size_bytes=len(data), sha256=sha256
    )
    left = {name: value for name, value in payload.items() if name not in texts}
    if request.task == "embedding":
        left["input"] = []  # Avro has no null in its place
    return _with(request, left, reference), data


def put_text_back(request: InferenceRequest, data: bytes) -> InferenceRequest:
    """The request with the text that was taken out of it. It is still to be validated. Raises InvalidRequest."""
    try:
        texts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("the text of the request in the store is not JSON", param="payload") from error
    if not isinstance(texts, dict) or texts.keys() - set(_TEXTS):
        raise InvalidRequest("the text of the request in the store has other fields than texts", param="payload")
    return _with(request, {**request.payload, **cast("dict[str, Any]", texts)}, None)


_AT_LEAST = INLINE_BYTES // _MOST_BYTES_OF_A_CHARACTER


def _characters(payload: dict[str, Any]) -> int:
    """About how many there are; calls of tools and the like are not counted. A token id counts as some."""
    get = payload.get
    count = len(get("prompt") or "") + len(get("text") or "") + 4 * len(get("prompt_token_ids") or ())
    for message in get("messages") or ():
        count += len(message.get("content") or "")
    return count + sum(map(len, get("input") or ())) + 4 * sum(map(len, get("input_token_ids") or ()))


def _with(request: InferenceRequest, payload: dict[str, Any], input_artifact: InputArtifact | None) -> InferenceRequest:
    changed: dict[str, Any] = {request.task: payload}
    return dataclasses.replace(request, input_artifact=input_artifact, **changed)
