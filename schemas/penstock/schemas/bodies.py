"""The JSON bodies of requests as types. One set gives validation, JSON Schema, OpenAPI and the texts of refusals.

Every way in is held to them: HTTP, WebSocket, JSON and Avro on Kafka. They are dictionaries with known keys, because
the records carry payloads as dictionaries (docs/decisions/0021 has the measurements). What depends on `Limits`, and
what concerns several fields at once, is checked by `payloads` and `requests` afterwards.

Avro has no place for JSON of any shape. Where OpenAI's protocol has it (a JSON Schema), the records carry JSON text,
and these bodies take either.
"""

from __future__ import annotations

import importlib
import json
from functools import cache
from typing import Annotated, Any, Literal, NotRequired, Required, TypeAlias, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema
from typing_extensions import TypedDict

from penstock.schemas.limits import LIMITS, MAX_ID_CHARS, MAX_URL_CHARS
from penstock.schemas.tasks import TASKS

INT, LONG = 2**31 - 1, 2**63 - 1  # the largest values of Avro's numbers
# Types inside a body without a configuration of their own take that of the type around them.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
OPEN = ConfigDict(extra="allow", strict=True)

Role = Literal["system", "developer", "user", "assistant", "tool"]
Name64: TypeAlias = Annotated[str, Field(min_length=1, max_length=64)]
Name200: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
JsonObject: TypeAlias = str | dict[str, Any]
"""An object, or its JSON text."""
Bytes: TypeAlias = Annotated[int, Field(ge=0, le=LONG)]
T = TypeVar("T")
ListOf: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list whose check ends at the first item that is wrong: a body has room for hundreds of thousands of them."""
TokenIds: TypeAlias = ListOf[Annotated[int, Field(ge=0, le=INT)]]


class ContentPart(TypedDict, total=False):
    """A part of a message: of type `text`, `image` or OpenAI's `image_url`; others are refused by name."""

    __pydantic_config__ = OPEN  # pyright: ignore[reportGeneralTypeIssues]

    type: Required[str]
    text: str | None
    image: Annotated[dict[str, Any] | None, Field(description="An image: {artifact_id} or {url}.")]
    image_url: Annotated[str | dict[str, Any] | None, Field(description="The same as OpenAI has it: {url, detail}.")]


def _arguments_text(value: Any) -> Any:
    """The call was made before, in whatever form its client keeps it: prompts show an object (`object_of`)."""
    if isinstance(value, str):
        return value
    try:
        return "" if value is None else json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):  # no JSON, from a caller in Python
        return value


class FunctionCall(TypedDict):
    """What a model wants to have called."""

    name: Name200
    arguments: Annotated[str, BeforeValidator(_arguments_text), Field(description="JSON text, as the model wrote it.")]


class ToolCall(TypedDict):
    """A call that an assistant's message asks for."""

    id: Name200
    type: NotRequired[Literal["function"] | None]
    function: FunctionCall


class ImageInput(TypedDict, total=False):
    """An image by reference, one of the two. Over HTTP it may also be `{data, media_type}`, its bytes in base64."""

    artifact_id: Annotated[Name200 | None, Field(description="An artifact of the same tenant.")]
    url: Annotated[
        str | None, Field(min_length=1, max_length=MAX_URL_CHARS, description="Where it lies, if that is allowed.")
    ]


class MessagePart(TypedDict, total=False):
    """A text or an image of a message, as the records carry it."""

    type: Required[Literal["text", "image"]]
    text: str | None
    image: ImageInput | None


class Message(TypedDict, total=False):
    """One message of a chat. `developer` is read as `system`."""

    role: Required[Role]
    content: Annotated[str | ListOf[ContentPart] | None, Field(description="Text, or parts: texts and images.")]
    name: Name64 | None
    tool_calls: Annotated[ListOf[ToolCall] | None, Field(description="Of an assistant: what it asked to be called.")]
    tool_call_id: Annotated[Name200 | None, Field(description="Of a tool: the call that it answers.")]
    parts: Annotated[ListOf[MessagePart] | None, Field(description="As the records have it: the parts, in order.")]
    reasoning_content: Annotated[
        str | None, Field(description="Of an assistant: what it thought before its answer. Chat templates may show it.")
    ]


class FunctionDefinition(TypedDict, total=False):
    """A function that the model may ask for."""

    name: Required[Name64]
    description: str | None
    parameters: Annotated[JsonObject | None, Field(description="JSON Schema of its arguments, or its JSON text.")]
    strict: bool | None


class Tool(TypedDict):
    """A tool that the model may ask for."""

    type: NotRequired[Literal["function"] | None]
    function: FunctionDefinition


class ResponseFormat(TypedDict, total=False):
    """The form of the answer."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    json_schema: Annotated[JsonObject | None, Field(description="For json_schema: {name, schema, strict}.")]
    schema: Annotated[
        JsonObject | None,
        Field(description="As llama.cpp has it, for json_object or json_schema: the same as json_schema.schema."),
    ]


class TextPayload(TypedDict, total=False):
    """The payload of text_generation: messages or prompt, one of the two."""

    messages: Annotated[
        ListOf[Message] | None, Field(min_length=1, description="With a conversation_id the new ones only.")
    ]
    prompt: Annotated[str | None, Field(description="Plain text to continue.")]
    prompt_token_ids: Annotated[TokenIds | None, Field(min_length=1, description="The prompt as tokens.")]
    max_tokens: Annotated[int | None, Field(ge=1, le=LIMITS.max_tokens, description="Longest answer, tokens.")]
    temperature: Annotated[float | None, Field(ge=0, le=2, description="0 is greedy.")]
    top_p: Annotated[float | None, Field(gt=0, le=1)]
    top_k: Annotated[int | None, Field(ge=1, le=1_000_000)]
    min_p: Annotated[float | None, Field(ge=0, le=1)]
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)]
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)]
    stop: Annotated[str | ListOf[str] | None, Field(description="Texts that end the text; not part of it.")]
    seed: Annotated[int | None, Field(ge=-LONG - 1, le=LONG)]
    n: Annotated[int | None, Field(ge=1, le=1_000, description="How many answers.")]
    logprobs: bool | None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)]
    prompt_logprobs: Annotated[
        int | None, Field(ge=0, le=20, description="Also those of the prompt, with so many candidates of each token.")
    ]
    tools: ListOf[Tool] | None
    tool_choice: Annotated[JsonObject | None, Field(description="none, auto, required, or an object naming one tool.")]
    response_format: ResponseFormat | None


class EmbeddingPayload(TypedDict, total=False):
    """The payload of embedding: texts, or texts as tokens."""

    input: Annotated[str | ListOf[str] | None, Field(description="Text or a list of at least one text.")]
    input_token_ids: Annotated[ListOf[TokenIds] | None, Field(min_length=1, description="The texts as tokens.")]
    dimensions: Annotated[int | None, Field(ge=1, le=65_536)]
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(ge=-1, le=INT, description="Tokens to which a longer text is cut, at its end; -1: the model's window."),
    ]


class Context(TypedDict, total=False):
    """How much of a conversation goes into the prompt."""

    max_tokens: Annotated[int | None, Field(ge=1, le=INT)]
    last_turns: Annotated[int | None, Field(ge=0, le=INT)]
    summary: Annotated[
        Literal["auto", "never", "required"] | bool | None,
        Field(
            description="auto, or null: a summary stands for older turns when not all fit; never, or false; required, "
            "or true: it stands for them even if they would fit, and without one the request is refused."
        ),
    ]


class RequirementsBody(TypedDict, total=False):
    """Memory that the caller knows to be needed."""

    vram_bytes: Bytes | None
    cpu_memory_bytes: Bytes | None


class Output(TypedDict, total=False):
    """Where artifacts go, and the form of the images that are made."""

    store: Annotated[str | None, Field(min_length=1, max_length=63, description="Name of a configured store.")]
    prefix: Name200 | None
    format: Annotated[Literal["png", "jpeg", "webp"] | None, Field(description="Of images; null: png.")]
    quality: Annotated[int | None, Field(ge=1, le=100, description="Of jpeg and webp.")]
    facts: Annotated[bool | None, Field(description="false: no word of how an image was made in its metadata.")]


# These two have several forms; `requests` reads them.
ConversationId: TypeAlias = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"}, {"type": "integer"}]}),
]
Moment: TypeAlias = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string", "format": "date-time"}, {"type": "number"}, {"type": "null"}]}),
]


class RequestFields(TypedDict, total=False):
    """What requests of every task have."""

    __pydantic_config__ = STRICT  # pyright: ignore[reportGeneralTypeIssues]

    model: Annotated[Name200 | None, Field(description="Its id or an alias; null: the best for the task.")]
    priority: Annotated[int | None, Field(ge=0, le=1_000, description="0 the most urgent; default 5.")]
    pool: Annotated[str | None, Field(pattern="^[A-Za-z0-9_-]{1,63}$")]
    user_id: Name200 | None
    session_id: Name200 | None
    conversation_id: Annotated[ConversationId, Field(description="Continue this conversation.")]
    context: Context | None
    extra: Annotated[dict[str, str] | None, Field(description="Texts passed on to a remote engine.")]
    stream: bool | None
    ttl_ms: Annotated[int | None, Field(ge=1, le=LIMITS.max_ttl_ms, description="Give up after so many milliseconds.")]
    deadline: Annotated[Moment, Field(description="The same as a time: RFC 3339 or Unix seconds.")]
    start_after: Annotated[Moment, Field(description="Not to start before: RFC 3339 or Unix seconds, within 24 h.")]
    execution_timeout_ms: Annotated[int | None, Field(ge=1, le=86_400_000)]
    max_attempts: Annotated[
        int | None,
        Field(
            ge=0,
            le=LIMITS.max_attempts,
            description="Attempts that may run; 0 or null: as many as fit before its deadline.",
        ),
    ]
    requirements: RequirementsBody | None
    output: Annotated[Output | None, Field(description="Of images: where they go, and in which form.")]
    callback_url: Annotated[str | None, Field(min_length=1, max_length=2_000, description="Called with the outcome.")]
    callback_statuses: Annotated[bool | None, Field(description="Whether it is called with statuses too.")]
    metadata: Annotated[dict[str, str] | None, Field(description="Echoed in the outcome.")]


class TextRequest(RequestFields, total=False):
    """A request for text. The payload may stand under `payload` or, as in Avro, under the task's name."""

    task: Required[Literal["text_generation"]]
    payload: TextPayload | None
    text_generation: TextPayload | None


class EmbeddingRequest(RequestFields, total=False):
    """A request for embeddings. The payload may stand under `payload` or, as in Avro, under the task's name."""

    task: Required[Literal["embedding"]]
    payload: EmbeddingPayload | None
    embedding: EmbeddingPayload | None


class SummarizationPayload(TypedDict, total=False):
    """The payload of summarization: a text, or a conversation as its topic has it.

    Neither where the request itself names a conversation: its summary is added to that.
    """

    text: Annotated[str | None, Field(description="The text; it may be longer than the model's window.")]
    conversation_id: Annotated[ConversationId, Field(description="The conversation; it is only read.")]
    through_offset: Annotated[
        int | None,
        Field(ge=0, le=LONG, description="Offset of the conversation's last record to sum up; null: up to its end."),
    ]
    max_tokens: Annotated[int | None, Field(ge=1, le=LIMITS.max_tokens, description="Longest summary, tokens.")]


class SummarizationRequest(RequestFields, total=False):
    """A request for a summary. The payload may stand under `payload` or, as in Avro, under the task's name."""

    task: Required[Literal["summarization"]]
    payload: SummarizationPayload | None
    summarization: SummarizationPayload | None


class ItemsPayload(TypedDict, total=False):
    """The payload of conversation_items: messages that are appended without an answer."""

    messages: Annotated[ListOf[Message] | None, Field(min_length=1, description="In their order.")]


class ItemsRequest(RequestFields, total=False):
    """A request to append to a conversation. The payload may stand under `payload` or, as in Avro, under the task's
    name."""

    task: Required[Literal["conversation_items"]]
    payload: ItemsPayload | None
    conversation_items: ItemsPayload | None


@cache
def request_type(task: str) -> Any:
    """The body of a request of a task that is built."""
    module, _, name = TASKS[task].body.partition(":")
    return getattr(importlib.import_module(module), name)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """What validates a body of this type."""
    return TypeAdapter(kind)


@cache
def json_schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a body, with what it refers to under `$defs`."""
    return adapter(kind).json_schema()
