"""The answers of the OpenAI routes as models, for OpenAPI. The official clients' own types are the full ones."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.gateway.routes.answers import Answer, Json, Logprob
from penstock.schemas.bodies import ToolCall


class PromptDetails(Answer):
    cached_tokens: int


class TextUsage(Answer):
    """OpenAI's counts of tokens; details where the engine reports them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class ChoiceLogprobs(Answer):
    content: list[Logprob] | None
    refusal: None = None


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletion(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage
    service_tier: str | None = None
    system_fingerprint: str | None = None


class CompletionLogprobs(Answer):
    """A value for each token. The first token of a prompt has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str


class Completion(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TextUsage


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Field(description="Numbers, or base64 of little-endian float32.")]


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ResponseUsage(Answer):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(Answer):
    """OpenAI's response object."""

    id: str
    object: Literal["response"]
    created_at: float
    status: str
    model: str
    output: list[Json]
    usage: ResponseUsage | None


class ResponseDeleted(Answer):
    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class ResponseItem(Answer):
    """A message, a call of a function, or its output."""

    id: str
    type: str


class MadeImage(Answer):
    b64_json: str | None = None
    url: str | None = None
    penstock: Annotated[Json, Field(description="The artifact: id, type, size, seed, digest.")]


class ImageList(Answer):
    """OpenAI's images response."""

    created: int
    data: list[MadeImage]
    output_format: str | None = None
    size: str | None = None
    usage: Json | None
