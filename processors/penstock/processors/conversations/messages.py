"""The conversation records of a request: its own input, its answer, and the form in which engines read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.schemas.records import ArtifactRef, ConversationMessage, InferenceRequest, Usage

Shown = Mapping[int, Sequence[ArtifactRef]]
"""The images that a request's own messages show, by the number of the message."""

PICTURE = "[image]"
"""Stands in the history for an image, where a model reads text alone."""


def input_messages(
    request: InferenceRequest, epoch: int, now_ms: int, shown: Shown | None = None
) -> list[ConversationMessage]:
    """The request's own messages as conversation records. A request about images has one: its prompt."""
    payload = request.payload or {}
    messages: list[dict[str, Any]] = payload.get("messages") or []
    if not messages:
        messages = [{"role": "user", "content": payload.get("prompt") or ""}]
    return [
        ConversationMessage(
            request_id=request.request_id,
            tenant=request.tenant,
            conversation_id=request.conversation_id or "",
            direction="in",
            index=index,
            epoch=epoch,
            attempt=1,
            role=str(message["role"]),
            content=str(message["content"]),
            name=message.get("name"),
            created_at=now_ms,
            metadata=dict(request.metadata),
            tool_calls=message.get("tool_calls") or None,
            tool_call_id=message.get("tool_call_id"),
            artifacts=list((shown or {}).get(index, ())),
            reasoning_content=message.get("reasoning_content"),
        )
        for index, message in enumerate(messages)
    ]


def answer_message(
    request: InferenceRequest,
    text: str,
    *,
    epoch: int,
    attempt: int,
    model: str | None,
    finish_reason: str | None,
    usage: Usage | None,
    now_ms: int,
    tool_calls: list[dict[str, Any]] | None = None,
    artifacts: Sequence[ArtifactRef] = (),
) -> ConversationMessage:
    """The record that keeps a request's answer."""
    return ConversationMessage(
        request_id=request.request_id,
        tenant=request.tenant,
        conversation_id=request.conversation_id or "",
        direction="out",
        index=0,
        epoch=epoch,
        attempt=attempt,
        role="assistant",
        content=text,
        name=None,
        created_at=now_ms,
        model=model,
        finish_reason=finish_reason,
        usage=usage,
        metadata=dict(request.metadata),
        tool_calls=tool_calls or None,
        artifacts=list(artifacts),
    )


def as_summary(answer: ConversationMessage, covers_through: int) -> ConversationMessage:
    """The same text as the record that stands for all messages up to an offset."""
    return replace(answer, direction="summary", role="system", covers_through=covers_through)


def as_chat(message: ConversationMessage) -> dict[str, Any]:
    """The message as a chat template takes it; in place of each image a word that says so."""
    words = [PICTURE] * len(message.artifacts)
    content = "\n".join([" ".join(words), message.content]).strip("\n") if words else message.content
    chat: dict[str, Any] = {"role": message.role, "content": content}
    if message.name:
        chat["name"] = message.name
    if message.tool_calls:
        chat["tool_calls"] = message.tool_calls
    if message.tool_call_id:
        chat["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        chat["reasoning_content"] = message.reasoning_content
    return chat
