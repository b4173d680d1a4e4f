"""Builders of records and of raw messages: a field that a test does not name has a valid default."""

from __future__ import annotations

from typing import Any

from penstock.common.reader import RawMessage
from penstock.schemas.records import Origin, ResultEvent, StatusEvent

ORIGIN = Origin(topic="t", partition=0, offset=0, append_time_ms=0)
COMMON: dict[str, Any] = {
    "request_id": "r", "tenant": "default", "origin": ORIGIN, "attempt": 1, "epoch": 1, "worker_id": "w",
    "created_at": 1,
}  # fmt: skip


def result_event(kind: str = "terminal", **facts: Any) -> ResultEvent:
    status = {"status": "completed"} if kind == "terminal" else {}
    return ResultEvent(**{**COMMON, "kind": kind, "task": "text_generation", **status, **facts})


def chunk(text: str, offset: int = 0, **facts: Any) -> ResultEvent:
    return result_event("chunk", text=text, text_offset=offset, **facts)


def status_event(status: str, rank: int, **facts: Any) -> StatusEvent:
    return StatusEvent(**{**COMMON, "status": status, "rank": rank, "done": False, **facts})


def raw(offset: int, key: bytes = b"k", value: bytes | None = b"v", *, partition: int = 0) -> RawMessage:
    return RawMessage("result", partition, offset, 0, key, value)
