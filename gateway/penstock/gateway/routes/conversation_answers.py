"""The answers of the routes of conversations, as `answers` has those of requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.gateway.routes.answers import Answer, Json, Time

Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]
Count = Annotated[int, Field(ge=0, le=1_000_000_000)]


class Policy(BaseModel):
    """When the summarizer sums up a conversation: after so many turns or tokens since its last summary, whichever comes
    first. With neither, and with 0, never."""

    model_config = ConfigDict(extra="forbid", strict=True)

    every_turns: Annotated[Count | None, Field(description="Whole turns.")] = None
    every_tokens: Annotated[Count | None, Field(description="Tokens, about.")] = None
    model: Annotated[
        str | None, Field(min_length=1, max_length=200, description="Null: the best for summarization.")
    ] = None


class ConversationChange(BaseModel):
    """What is not named stays as it is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    title: Annotated[str | None, Field(max_length=512, description="A name for people.")] = None
    metadata: Annotated[Metadata | None, Field(max_length=16, description="In place of all that there was.")] = None
    summarize: Annotated[Policy | None, Field(description="Null: as the settings say.")] = None


class NewConversation(ConversationChange):
    """All optional."""

    id: Annotated[str | int | None, Field(description="[A-Za-z0-9_-]{1,128}; without one it is made.")] = None
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
    title: str | None
    metadata: dict[str, str]
    summarize: Annotated[Policy | None, Field(description="Its own policy; null: as the settings say.")]
    last_active_at: Annotated[
        int | None, Field(description="When its newest record was written, Unix seconds; null without one.")
    ]
    expires_at: Annotated[
        int | None,
        Field(
            description="When it is deleted if nobody touches it before, Unix seconds; null: never, or not known yet."
        ),
    ]
    forked_from: Annotated[ForkedFrom | None, Field(description="Of a fork.")] = None


class ConversationBranch(Conversation):
    """A conversation of a tree."""

    depth: Annotated[int, Field(description="How many others it goes on from.")]
    messages: Annotated[int, Field(description="How many it adds to what it inherits.")]
    deleted: Annotated[bool, Field(description="It is there for those that go on from it.")]


class ExpiringConversation(Answer):
    """A conversation that is due, or will be; one with an open request stays until that has ended."""

    tenant: str
    conversation_id: str
    last_active_at: Time
    expires_at: Time
    retention_s: float
    open_request: bool


class ConversationSweep(Answer):
    """How many conversations are due, and the first thousand of them."""

    object: Literal["conversation.sweep"]
    dry_run: bool
    conversations: int
    data: list[ExpiringConversation]


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
    first_id: str | None
    last_id: str | None
    next_offset: int
    end_offset: Annotated[int, Field(description="The end of the conversation at the first page.")]
