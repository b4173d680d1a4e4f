"""Responses that are fetched later, made of their request's record: what they repeat and were made of. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.gateway.openai.responses_answers import ID_PREFIX, Asked, Json
from penstock.schemas.errors import NotFound
from penstock.schemas.records import STATUS_RANKS, InferenceRequest


def request_id_of(response_id: str) -> str:
    """Raises NotFound for what is no id of a response."""
    if not response_id.startswith(ID_PREFIX):
        raise NotFound("there is no such response: ids of responses begin with " + ID_PREFIX)
    return response_id.removeprefix(ID_PREFIX)


def asked_of(request: InferenceRequest, accepted_ms: int, model: str | None) -> Asked:
    """What the response repeats. Raises NotFound for a request whose response is not stored."""
    if request.response_object is None:
        raise NotFound("this response was not stored: it was not made by /v1/responses, or with store: false")
    return Asked(
        request_id=request.request_id,
        created=accepted_ms // 1000,
        model=model or request.model or "default",
        metadata={**request.metadata},
        repeated=json.loads(request.response_object),
    )


def unfinished(asked: Asked, status: str) -> Json:
    """The response of a request with this status that has not ended."""
    runs = STATUS_RANKS.get(status, 0) >= STATUS_RANKS["running"]
    return asked.response("in_progress" if runs else "queued", [])


def input_items(request: InferenceRequest, asked: Asked) -> list[Json]:
    """What was given to the model as input, in order, without the instructions."""
    messages: list[Json] = request.payload.get("messages") or []
    first = 0 if asked.repeated["instructions"] is None else 1
    return [
        item
        for number, message in enumerate(messages[first:])
        for item in _items(message, f"{request.request_id}_in{number}")
    ]


def _items(message: Json, name: str) -> Iterator[Json]:
    if message["role"] == "tool":
        output = {"call_id": message.get("tool_call_id"), "output": message["content"]}
        yield {"type": "function_call_output", "id": f"fco_{name}", **output, "status": "completed"}
        return
    calls: list[Json] = message.get("tool_calls") or []
    if message["content"] or message.get("parts") or not calls:
        kind = "output_text" if message["role"] == "assistant" else "input_text"
        parts: list[Json] = message.get("parts") or [{"type": "text", "text": message["content"]}]
        content = [_part(part, kind) for part in parts]
        yield {
            "type": "message",
            "id": f"msg_{name}",
            "role": message["role"],
            "status": "completed",
            "content": content,
        }
    for number, call in enumerate(calls):
        said = {"call_id": call["id"], **call["function"]}
        yield {"type": "function_call", "id": f"fc_{name}_{number}", **said, "status": "completed"}


def _part(part: Json, kind: str) -> Json:
    if part["type"] == "text":
        shown: dict[str, Any] = {"type": kind, "text": part["text"]}
        return {**shown, "annotations": [], "logprobs": []} if kind == "output_text" else shown
    image: Json = part["image"]
    return {
        "type": "input_image",
        "detail": "auto",
        "image_url": image.get("url"),
        "file_id": image.get("artifact_id"),
    }
