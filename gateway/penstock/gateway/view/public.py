"""A request as callers see it. Pure."""

from __future__ import annotations

from typing import Any

from penstock.gateway.view.outputs import error_json, result_json
from penstock.gateway.view.request_state import RequestState
from penstock.schemas.histories import history_json
from penstock.schemas.records import StatusEvent, WaitingFor
from penstock.schemas.times import rfc3339


def request_json(entry: RequestState, *, whole: bool = False) -> dict[str, Any]:
    """The request as callers see it.

    A large output, and one that is not held, is left out, and `result_omitted` says so. With `whole` a large one is
    there, which is for a thread.
    """
    event, done, status = entry.terminal, entry.done, entry.status
    waiting = None if done else status
    said = event or status
    status_ms = entry.finished_ms if done else entry.accepted_ms if status is None else status.created_at
    public: dict[str, Any] = {
        "object": "request",
        "request_id": entry.request_id,
        "task": entry.task,
        "status": entry.status_name,
        "done": done,
        "attempt": entry.fold.attempt if done else 1 if status is None else status.attempt,
        "priority": entry.priority,
        "model": entry.model,
        "pool": entry.pool,
        "conversation_id": entry.conversation_id,
        "position": None if waiting is None else waiting.position,
        "detail": None if waiting is None else waiting.detail,
        "waiting_for": None if waiting is None else waiting_json(waiting.waiting_for),
        "progress": progress_json(waiting),
        "model_reason": None if status is None else status.model_reason,
        "worker_id": None if said is None else said.worker_id,
        "device": None if event is None else event.device,
        "status_at": rfc3339(status_ms),
        "first_token_at": rfc3339(entry.first_piece_ms) if entry.first_piece_ms else None,
        "ttl_ms": None if status is None else status.ttl_ms,
        "created_at": rfc3339(entry.listed_ms),
        "start_after": rfc3339(entry.waits_from_ms) if entry.waits_from_ms > entry.accepted_ms else None,
        "finished_at": rfc3339(entry.finished_ms) if done else None,
        "timings": None if event is None or event.timings is None else event.timings.to_dict(),
        "result": None if event is None or entry.large is not None else result_json(event),
        "error": None if event is None else error_json(event, entry.request_id),
        "metadata": entry.metadata,
        **entry.labels._asdict(),
    }
    if entry.redriven_from is not None:
        public["redriven_from"] = entry.redriven_from
    if said is not None and said.history is not None:
        public.update(history_json(said.history))
    if whole and entry.large is not None:
        public["result"] = entry.large.result()
    elif entry.large is not None or entry.lacks_outcome:
        public["result_omitted"] = True
    return public


def waiting_json(waiting: WaitingFor | None) -> dict[str, Any] | None:
    """What a request waits for, as callers see it."""
    if waiting is None:
        return None
    at_ms = waiting.estimated_start_at
    return {
        "reason": waiting.reason,
        "position": waiting.position,
        "need_bytes": waiting.need_bytes,
        "free_bytes": waiting.free_bytes,
        "estimated_start_at": None if at_ms is None else rfc3339(at_ms),
    }


def progress_json(status: StatusEvent | None) -> dict[str, int] | None:
    """How far a run is, as callers see it."""
    if status is None or status.step is None or status.steps is None:
        return None
    return {"step": status.step, "steps": status.steps}
