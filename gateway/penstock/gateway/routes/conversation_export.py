"""A conversation as lines of JSON, to be kept as a file and to be imported elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse

from penstock.common.conversations import Turn
from penstock.gateway.context import service_of
from penstock.gateway.conversations.pages import Outline
from penstock.gateway.conversations.trees import Branch
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.routes.conversations import read_conversation
from penstock.schemas.errors import Conflict, PenstockError
from penstock.schemas.times import rfc3339

router = APIRouter(prefix="/v1/conversations", tags=["conversations"])

MEDIA_TYPE = "application/jsonl"
FORMAT_VERSION = 1
TREE_VERSION = 2
"""An importer that does not know of forks must not take a fork for a whole conversation."""
PAGE_MESSAGES = 100
ERASED = "some of it was erased while it was exported; export it again"


@router.get("/{conversation_id}/export", summary="The conversation as JSON lines")
async def export(
    request: Request,
    conversation_id: str,
    tree: Annotated[bool, Query(description="All conversations of its tree, each without what it inherits.")] = False,
) -> StreamingResponse:
    """The first line has the conversation's own facts: `version` of the format, `id`, `log_id`, `created_at`,
    `messages` and `summaries`, which are the numbers of the lines that follow. Then each message that counts, and each
    summary, in order.

    With `tree` so for each conversation of its tree, parents first. The first line of a fork has `forked_from`, with
    the number of messages that it inherits; the first line of all has `forks`, how many conversations follow.

    It holds what stood there when it began. If it cannot go on to its end, its last line is an error.
    """
    conversations = service_of(request).conversations
    if tree:
        lines = _tree_lines(request, await read_conversation(request, conversations.tree, conversation_id))
    else:
        outline = await read_conversation(request, conversations.outline, conversation_id)
        lines = _lines(request, conversation_id, outline)
    headers = {"content-disposition": f'attachment; filename="{conversation_id}.jsonl"'}
    return StreamingResponse(lines, media_type=MEDIA_TYPE, headers=headers)


async def _lines(request: Request, conversation_id: str, outline: Outline) -> AsyncGenerator[bytes]:
    yield _line(_head(FORMAT_VERSION, conversation_id, outline))
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
        yield _error_line(error)


async def _tree_lines(request: Request, branches: Sequence[Branch]) -> AsyncGenerator[bytes]:
    threads, trees = service_of(request).threads.conversations, service_of(request).conversations.trees
    tenant = caller_of(request).tenant
    at, begin, told = 0, branches[0].begin, 0
    try:
        while at < len(branches):
            for page in await threads.run_for(tenant, trees.pages, branches, at, begin):
                lines = [_line(exported(turn)) for turn in page.turns]
                if not told:
                    lines.insert(0, _line(_branch_head(page.branch, forks=None if at else len(branches) - 1)))
                told += len(lines)
                yield b"".join(lines)
                if page.is_last:
                    if told != 1 + page.branch.messages + page.branch.summaries:
                        raise Conflict(ERASED)
                    at, told = at + 1, 0
                    begin = branches[at].begin if at < len(branches) else 0
                else:
                    begin = page.turns[-1].offset + 1 - page.branch.base
    except PenstockError as error:
        yield _error_line(error)


def _head(version: int, conversation_id: str, about: Outline | Branch) -> dict[str, Any]:
    return {
        "object": "conversation.export",
        "version": version,
        "id": conversation_id,
        "log_id": about.topic_id,
        "created_at": None if about.created_ms is None else rfc3339(about.created_ms),
        "messages": about.messages,
        "summaries": about.summaries,
    }


def _branch_head(branch: Branch, forks: int | None) -> dict[str, Any]:
    """`forks`: of the first line of a tree."""
    made_of = branch.forked_from
    return {
        **_head(TREE_VERSION, branch.conversation_id, branch),
        **({} if forks is None else {"forks": forks}),
        **({"deleted": True} if branch.is_deleted else {}),
        **(
            {}
            if made_of is None
            else {
                "forked_from": {
                    "conversation_id": made_of.conversation_id,
                    "through": made_of.through,
                    "messages": branch.inherited,
                }
            }
        ),
    }


def _error_line(error: PenstockError) -> bytes:
    return _line({"type": "error", "error": {"code": error.code, "message": error.message}})


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
