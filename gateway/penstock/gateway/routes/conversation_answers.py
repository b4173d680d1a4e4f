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
    items: Annotated[list[Json] | None, Field(description="Items to begin with.")] = None


class ForkedFrom(Answer):
    """Where a fork goes on."""

    conversation_id: str
    through: Annotated[int, Field(description="Offset of the last message that both have.")]


class NewFork(Answer):
    model_config = ConfigDict(extra="forbid")

    through: Annotated[str | int, Field(description="The last item of both, or its offset.")]
    id: Annotated[str | int | None, Field(description="[A-Za-z0-9_-]{1,128}; without one it is made.")] = None


class Conversation(Answer):
    object: Literal["conversation"]
    id: str
    created_at: Annotated[int | None, Field(description="Unix seconds, as OpenAI has it; null in lists.")]
    metadata: Json
    forked_from: Annotated[ForkedFrom | None, Field(description="Of a fork.")] = None


class ConversationDeleted(Answer):
    object: Literal["conversation.deleted"]
    id: str
    deleted: Literal[True]


class NewItems(Answer):
    """Items to append: messages, calls of tools and their answers, as `/v1/responses` takes them."""

    model_config = ConfigDict(extra="forbid")

    items: Annotated[list[Json], Field(min_length=1)]


class NewSummary(Answer):
    """All optional; beside these what a request of any task has."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str | None, Field(description="Null: the best for summarization.")] = None
    max_tokens: Annotated[int | None, Field(ge=1, description="Longest summary, tokens.")] = None
    through_offset: Annotated[
        int | None, Field(ge=0, description="Offset of the last record to sum up; null: up to its end.")
    ] = None


class ConversationItem(Answer):
    """A message that counts, a call of a tool in it, or the answer of a tool."""

    object: Literal["conversation.item"]
    type: Literal["message", "function_call", "function_call_output"]
    id: str
    status: Literal["completed"]
    role: str | None = None
    content: list[Json] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
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
