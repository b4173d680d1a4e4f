"""Records for tests of the gateway. Each builder has defaults for all fields; a test names the ones it is about."""

from __future__ import annotations

from typing import Any

from penstock.schemas.codec import default_codec
from penstock.schemas.records import (
    STATUS_RANKS,
    ConversationMessage,
    InferenceRequest,
    ModelInfo,
    ModelState,
    Origin,
    Place,
    ResultEvent,
    StatusEvent,
    WebhookDelivery,
    WorkerState,
)

CODEC = default_codec()
ORIGIN = Origin(topic="inference.request.medium", partition=0, offset=7, append_time_ms=1_000)
PLACE = Place(topic=ORIGIN.topic, partition=ORIGIN.partition, offset=ORIGIN.offset)
ATTEMPT: dict[str, Any] = {"origin": ORIGIN, "attempt": 1, "epoch": 1, "worker_id": "w", "created_at": 1}


def request(request_id: str = "r", **fields: Any) -> InferenceRequest:
    body: dict[str, Any] = {"task": "text_generation", "text_generation": {"prompt": "a"}, "created_at": 1}
    return InferenceRequest(request_id=request_id, **{**body, **fields})


def status(name: str, request_id: str = "r", **fields: Any) -> StatusEvent:
    known: dict[str, Any] = {"rank": STATUS_RANKS[name], "done": STATUS_RANKS[name] == 100, "tenant": "default"}
    return StatusEvent(request_id=request_id, status=name, **{**known, **ATTEMPT, **fields})


def chunk(text: str | None = None, text_offset: int | None = None, request_id: str = "r", **fields: Any) -> ResultEvent:
    """A result event that ends nothing. Without a text it is a claim: a worker that begins."""
    known: dict[str, Any] = {"kind": "chunk", "task": "text_generation", "tenant": "default"}
    values = {**known, **ATTEMPT, **fields}
    return ResultEvent(request_id=request_id, text=text, text_offset=text_offset, **values)


def outcome(request_id: str = "r", **fields: Any) -> ResultEvent:
    """A terminal event: completed, unless a field says otherwise."""
    return chunk(request_id=request_id, **{"kind": "terminal", "status": "completed", **fields})


def worker(worker_id: str = "w", **fields: Any) -> WorkerState:
    return WorkerState(worker_id=worker_id, **{"state": "running", "started_at": 1, "updated_at": 1, **fields})


def model_info(model: str = "m", **fields: Any) -> ModelInfo:
    known: dict[str, Any] = {"tasks": ["text_generation"], "engine": "noop", "state": "ready", "worker_id": "w"}
    return ModelInfo(model=model, **{**known, "updated_at": 1, **fields})


def model_state(model: str = "m", state: str = "ready", **fields: Any) -> ModelState:
    return ModelState(model=model, state=state, **fields)


def conversation_message(role: str = "user", **fields: Any) -> ConversationMessage:
    """A question or, of an assistant, an answer; a summary with `covers_through`."""
    direction = "summary" if "covers_through" in fields else "out" if role == "assistant" else "in"
    known: dict[str, Any] = {"tenant": "t", "conversation_id": "c", "content": "word", "created_at": 0}
    return ConversationMessage(role=role, **{**known, "direction": direction, **fields})


def delivery(request_id: str = "r", offset: int = 1, partition: int = 0, **fields: Any) -> WebhookDelivery:
    known: dict[str, Any] = {"webhook_id": "m", "tenant": "t", "type": "request.completed", "state": "waiting"}
    known |= {"url": f"http://h/{request_id}", "created_at": 0, "updated_at": 0, "next_at": 0}
    place = Place(topic="inference.result", partition=partition, offset=offset)
    return WebhookDelivery(request_id=request_id, **{**known, "place": place, **fields})
