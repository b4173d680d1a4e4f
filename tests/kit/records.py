"""Records for tests, by default of one request, "r". A test names the fields that it is about."""

from __future__ import annotations

import uuid
from typing import Any

from penstock.common.clock import now_ms
from penstock.gateway.batches.records import Batch
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view.frames import Frame
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.request_state import Key
from penstock.schemas.codec import default_codec
from penstock.schemas.records import (
    STATUS_RANKS,
    ArtifactRef,
    ControlCommand,
    ConversationMessage,
    GatewayState,
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
from penstock.schemas.topics import TP, TopicNames

CODEC = default_codec()
NAMES = TopicNames("p-")
REQUESTS: TP = (NAMES.request("text_generation", 5), 0)
HIGH: TP = (NAMES.request("text_generation", 1), 0)
RESULTS: TP = (NAMES.result, 0)
STATUSES: TP = (NAMES.status, 0)
CONTROL: TP = (NAMES.control, 0)
KEY: Key = ("default", "r")
ORIGIN = Origin(topic=REQUESTS[0], partition=REQUESTS[1], offset=0, append_time_ms=1_000)
LARGE = ArtifactRef(artifact_id="f", uri="file:f", media_type="text/plain", size_bytes=2, sha256="0")

Fields = dict[str, Any]


def request(request_id: str = "r", **fields: Any) -> InferenceRequest:
    known: Fields = {"task": "text_generation", "created_at": 900, "tenant": "default"}
    if fields.get("task", "text_generation") == "text_generation":
        known["text_generation"] = {"prompt": "secret"}
    return InferenceRequest(request_id=request_id, **{**known, **fields})


def _attempt(request_id: str, **fields: Any) -> Fields:
    known: Fields = {"request_id": request_id, "tenant": "default", "origin": ORIGIN, "attempt": 1, "epoch": 1}
    return {**known, "worker_id": "w", "created_at": 2_000, **fields}


def status(name: str = "running", request_id: str = "r", **fields: Any) -> StatusEvent:
    rank = STATUS_RANKS[name]
    return StatusEvent(status=name, **_attempt(request_id, **{"done": rank == 100, "rank": rank, **fields}))


def chunk(text: str | None = "sec", text_offset: int | None = 0, request_id: str = "r", **fields: Any) -> ResultEvent:
    known: Fields = {"kind": "chunk", "task": "text_generation"}
    return ResultEvent(text=text, text_offset=text_offset, **_attempt(request_id, **{**known, **fields}))


def claim(**fields: Any) -> ResultEvent:
    """A worker that begins."""
    return chunk(None, None, **fields)


def outcome(request_id: str = "r", text: str | None = None, **fields: Any) -> ResultEvent:
    """The terminal event: completed, unless a field says otherwise. `text`: its output, if it has one."""
    output: Fields = {} if text is None else {"text_generation": {"text": text}}
    return claim(request_id=request_id, **{"kind": "terminal", "status": "completed", **output, **fields})


def command(kind: str, request_id: str = "r", **fields: Any) -> ControlCommand:
    return ControlCommand(kind=kind, request_id=request_id, **{"tenant": "default", "created_at": 3_000, **fields})


def model_info(model: str = "m", *tasks: str, **fields: Any) -> ModelInfo:
    known: Fields = {"engine": "text", "state": "ready", "updated_at": 1, "worker_id": "w"}
    known["tasks"] = [*tasks] or ["text_generation"]
    return ModelInfo(model=model, **{**known, **fields})


def model_state(model: str = "m", state: str = "ready", **fields: Any) -> ModelState:
    return ModelState(model=model, state=state, **fields)


def worker(worker_id: str = "w", *models: ModelState, **fields: Any) -> WorkerState:
    known: Fields = {"state": "running", "started_at": 1, "updated_at": 1, "models": [*models]}
    return WorkerState(worker_id=worker_id, **{**known, **fields})


def gateway_state(gateway_id: str = "gateway-h-1", **fields: Any) -> GatewayState:
    """A report of what its id begins with."""
    known: Fields = {"kind": gateway_id.partition("-")[0], "version": "1", "host": "h", "pid": 7, "status": "ready"}
    return GatewayState(id=gateway_id, **{**known, "started_at": 1, "reported_at": 1, **fields})


def conversation_message(role: str = "user", **fields: Any) -> ConversationMessage:
    """A question or, of an assistant, an answer; a summary with `covers_through`."""
    direction = "summary" if "covers_through" in fields else "out" if role == "assistant" else "in"
    known: Fields = {"tenant": "t", "conversation_id": "c", "content": "word", "created_at": 0}
    return ConversationMessage(role=role, **{**known, "direction": direction, **fields})


def delivery(request_id: str = "r", offset: int = 1, partition: int = 0, **fields: Any) -> WebhookDelivery:
    known: Fields = {"webhook_id": "m", "tenant": "t", "type": "request.completed", "state": "waiting"}
    known |= {"url": f"http://h/{request_id}", "created_at": 0, "updated_at": 0, "next_at": 0}
    place = Place(topic="inference.result", partition=partition, offset=offset)
    return WebhookDelivery(request_id=request_id, **{**known, "place": place, **fields})


def new_batch(tenant: str = "default", **fields: Any) -> Batch:
    """A batch that was made now, without lines, and expires in a minute."""
    created_ms = fields.setdefault("created_ms", now_ms())
    known: dict[str, Any] = {"batch_id": str(uuid.uuid4()), "input_file_id": str(uuid.uuid4()), "key_id": None}
    known |= {"endpoint": "/v1/embeddings", "expires_at": created_ms // 1000 + 60}
    return Batch(tenant=tenant, **{**known, **fields})


def subscribed(*frames: Frame) -> Subscription:
    """The subscription to one request whose frames are all there."""
    subscription = Subscription(Hub(), single=True)
    subscription.push(frames)
    return subscription
