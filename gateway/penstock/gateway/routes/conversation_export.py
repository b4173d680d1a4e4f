"""A conversation as lines of JSON, to be kept as a file and to be imported elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from penstock.common.conversations import Turn
from penstock.gateway.context import service_of
from penstock.gateway.conversations.pages import Outline
from penstock.gateway.routes.conversations import read_conversation
from penstock.schemas.errors import Conflict, PenstockError
from penstock.schemas.times import rfc3339

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])

MEDIA_TYPE = "application/jsonl"
FORMAT_VERSION = 1
PAGE_MESSAGES = 100
ERASED = "some of it was erased while it was exported; export it again"


@router.get("/{conversation_id}/export", summary="The conversation as JSON lines")
async def export(request: Request, conversation_id: str) -> StreamingResponse:
    """The first line has the conversation's own facts: `version` of the format, `id`, `log_id`, `created_at`,
    `messages` and `summaries`, which are the numbers of the lines that follow. Then each message that counts, and each
    summary, in order.

    It holds what stood there when it began. If it cannot go on to its end, its last line is an error.
    """
    outline = await read_conversation(request, service_of(request).conversations.outline, conversation_id)
    lines = _lines(request, conversation_id, outline)
    headers = {"content-disposition": f'attachment; filename="{conversation_id}.jsonl"'}
    return StreamingResponse(lines, media_type=MEDIA_TYPE, headers=headers)


async def _lines(request: Request, conversation_id: str, outline: Outline) -> AsyncGenerator[bytes]:
    yield _line(_head(conversation_id, outline))
    told, begin = 0, 0
    try:
        while begin < outline.end:
            turns = await read_conversation(
                request, service_of(request).conversations.told, conversation_id, PAGE_MESSAGES, begin, outline.end
            )
            if turns:
                yield b"".join(_line(exported(turn)) for turn in turns)
            told += len(turns)
            begin = turns[-1].offset + 1 if len(turns) == PAGE_MESSAGES else outline.end
        now = await read_conversation(request, service_of(request).conversations.outline, conversation_id)
        if now.topic_id != outline.topic_id or told != outline.messages + outline.summaries:
            raise Conflict(ERASED)
    except PenstockError as error:
        yield _line({"type": "error", "error": {"code": error.code, "message": error.message}})


def _head(conversation_id: str, about: Outline) -> dict[str, Any]:
    return {
        "object": "conversation.export",
        "version": FORMAT_VERSION,
        "id": conversation_id,
        "log_id": about.topic_id,
        "created_at": None if about.created_ms is None else rfc3339(about.created_ms),
        "messages": about.messages,
        "summaries": about.summaries,
    }


def exported(turn: Turn) -> dict[str, Any]:
    """A message or summary: what it says, and under `source` where and when it was said, which no import repeats."""
    message = turn.message
    source: dict[str, Any] = {
        "offset": turn.offset,
        "created_at": rfc3339(message.created_at),
        "request_id": message.request_id,
        "direction": message.direction,
        "model": message.model,
        "finish_reason": message.finish_reason,
        "usage": None if message.usage is None else message.usage.to_dict(),
        "metadata": dict(message.metadata),
        "covers_through": message.covers_through,
    }
    said: dict[str, Any] = {
        "role": message.role,
        "content": message.content,
        "name": message.name,
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
        "images": [
            {name: getattr(image, name) for name in ("artifact_id", "media_type", "size_bytes", "sha256")}
            for image in message.artifacts
        ],
    }
    kind = "summary" if message.direction == "summary" else "message"
    return {"type": kind, **_given(said), "source": _given(source)}


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what is null or empty; a text may be empty."""
    return {name: value for name, value in fields.items() if value not in (None, [], {})}


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
