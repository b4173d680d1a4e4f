"""The answers of the routes of conversations, as `answers` has those of requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from penstock.gateway.routes.answers import Answer, Json, Time


class NewConversation(Answer):
    """All optional."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str | int | None, Field(description="[A-Za-z0-9_-]{1,128}; without one it is made.")] = None
    metadata: Annotated[Json | None, Field(description="Only empty.")] = None


class Conversation(Answer):
    object: Literal["conversation"]
    id: str
    created_at: Annotated[int | None, Field(description="Unix seconds, as OpenAI has it; null in lists.")]
    metadata: Json


class ConversationDeleted(Answer):
    object: Literal["conversation.deleted"]
    id: str
    deleted: Literal[True]


class ItemPart(Answer):
    type: Literal["input_text", "output_text"]
    text: str


class ConversationItem(Answer):
    """A message that counts."""

    object: Literal["conversation.item"]
    type: Literal["message"]
    id: str
    role: str
    status: Literal["completed"]
    content: list[ItemPart]
    created_at: Annotated[int, Field(description="Unix seconds.")]
    request_id: str | None
    offset: int


class ConversationRecordBody(Answer):
    """A record of the topic, whether it counts or not."""

    offset: int
    key: str | None
    time: Time | None
    message: Json | None


class Replay(Answer):
    object: Literal["list"]
    data: list[ConversationRecordBody]
    has_more: bool
    first_id: int | None
    last_id: int | None
    next_offset: int
