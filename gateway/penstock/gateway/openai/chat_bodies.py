"""The bodies of the OpenAI routes: what is read, what is passed on, what is harmless, and what is refused.

Every field that OpenAI documents is classified here. Supported ones are typed fields. A field outside of them passes
only with a value that would not change the output; with any other value, or unknown, it is `unsupported_parameter`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.history import chat_messages, tools_of
from penstock.gateway.openai.other_fields import (
    HARMLESS_CHAT,
    HARMLESS_COMPLETION,
    HARMLESS_EMBEDDING,
    refuse_unsupported,
)
from penstock.gateway.service.brought_images import BroughtImage, take_images
from penstock.schemas.bodies import ListOf
from penstock.schemas.errors import InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import parse_request

Json = dict[str, Any]
Words = Mapping[str, str]
"""For fields of the native request, how a route calls them where that is another name."""

TIER_PRIORITIES: dict[str | None, int | None] = {
    None: None,
    "auto": None,
    "default": 5,
    "priority": 2,
    "fast": 2,
    "flex": 8,
}
COMPLETION_MAX_TOKENS = 16
"""What OpenAI takes for `max_tokens` on /v1/completions when it is left out."""
COMPLETION_WORDS: Words = {
    "payload.top_logprobs": "logprobs",
    "payload.prompt_logprobs": "echo",
    "payload.prompt_token_ids": "prompt",
}


_PASSED_ON: dict[str, Sequence[Any]] = {
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "truncate_prompt_tokens": (),
    "chat_template_kwargs": ({},),
}
"""Fields that travel in `extra`, each with the values that change nothing and go nowhere."""
_PENSTOCK_ONLY = {"priority", "conversation_id", "ttl_ms", "pool", "deadline", "start_after", "execution_timeout_ms"}
_AS_THEY_ARE = frozenset(
    {
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "stop",
        "seed",
        "n",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
    }
)
"""Fields that are the payload's under the same name."""


MAX_ENTRIES = 2_048


def _of_few_entries(value: Any, info: ValidationInfo) -> Any:
    """Refuse an object that is far too large before each of its entries can become an error of its own."""
    if isinstance(value, dict) and len(cast("Json", value)) > MAX_ENTRIES:
        raise TooLarge(f"{info.field_name} has more than {MAX_ENTRIES} entries", param=info.field_name)
    return value


def _first_wrong_number(value: Any) -> Any:
    """Of a large object with what is no number only the first such entry: that is refused as all would be."""
    if isinstance(value, dict) and len(cast("Json", value)) > MAX_ENTRIES:
        for name, item in cast("Json", value).items():
            if type(item) is not float and type(item) is not int:
                return {name: item}
    return value


FEW_ENTRIES = BeforeValidator(_of_few_entries)
ONE_WRONG_NUMBER = BeforeValidator(_first_wrong_number)


JUDGED = ConfigDict(extra="allow", strict=True)
"""Unlisted fields are kept, to be judged by `set_aside` and `refuse_unsupported`. Strict: "0.5" is no number."""


class StreamOptions(BaseModel):
    """Usage comes at the end, and no event is padded against eavesdroppers, whatever the last two say."""

    model_config = JUDGED

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class PenstockOptions(BaseModel):
    """`extra_body={"penstock": {…}}`: what OpenAI's protocol has no field for. Checked with the native request."""

    model_config = ConfigDict(extra="forbid")

    priority: Any = Field(None, description="0 the most urgent; default 5")
    conversation_id: Any = Field(None, description="continue this conversation; messages are the new ones only")
    context: Any = Field(None, description="{max_tokens, last_turns}: how much of the conversation is used")
    ttl_ms: Any = Field(None, description="give up after this many milliseconds")
    deadline: Any = Field(None, description="the same as a time: RFC 3339 or Unix seconds")
    start_after: Any = Field(None, description="not to start before: RFC 3339 or Unix seconds, within 24 h")
    execution_timeout_ms: Any = None
    max_attempts: Any = None
    pool: Any = None
    requirements: Any = None
    session_id: Any = None
    callback_url: Any = Field(None, description="called with the outcome")
    callback_statuses: Any = Field(None, description="whether it is called with statuses too")
    extra: Any = Field(None, description="texts passed on to a remote engine")
    top_k: Any = None
    min_p: Any = None


class OpenAIBody(BaseModel):
    """What all bodies have."""

    model_config = JUDGED

    model: str | None = None
    user: str | None = None
    penstock: Annotated[PenstockOptions | None, FEW_ENTRIES] = None


class GeneratingBody(OpenAIBody):
    """What bodies for text have beyond OpenAI's fields: many servers and clients know these."""

    top_k: Annotated[int | None, Field(description="0 and -1: all tokens.")] = None
    repetition_penalty: Annotated[float | None, Field(description="1 is none.")] = None
    min_tokens: Annotated[int | None, Field(description="So many come before the text may end.")] = None
    ignore_eos: Annotated[bool | None, Field(description="The text ends at max_tokens alone.")] = None
    truncate_prompt_tokens: Annotated[
        int | None, Field(description="Only the last so many tokens of the prompt are read; -1: what fits.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, FEW_ENTRIES, Field(description="Variables for the model's chat template.")
    ] = None

    @property
    def limited_top_k(self) -> int | None:
        return None if self.top_k in (0, -1) else self.top_k

    @property
    def passed_on(self) -> Json:
        """The given ones of these and of OpenAI's fields that travel in `extra`."""
        return {name: getattr(self, name) for name in self.model_fields_set & _PASSED_ON.keys()}


class _TextBody(GeneratingBody):
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    min_p: Annotated[float | None, Field(description="Not OpenAI's own; many servers and clients have it.")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    stop: str | ListOf[str] | None = None
    seed: int | None = None
    logit_bias: Annotated[dict[str, float] | None, ONE_WRONG_NUMBER] = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, FEW_ENTRIES] = None
    metadata: Annotated[dict[str, str] | None, FEW_ENTRIES] = None
    service_tier: str | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionBody(_TextBody):
    """The body of POST /v1/chat/completions."""

    messages: ListOf[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None


class CompletionBody(_TextBody):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def only_prompt(self) -> bool:
        """Whether nothing but the prompt is wanted. One token is made all the same, and not shown."""
        return bool(self.echo) and self.max_tokens == 0


class EmbeddingBody(OpenAIBody):
    """The body of POST /v1/embeddings."""

    input: str | list[Any]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    truncate: Annotated[bool | None, Field(description="Cut texts that are longer than the model's window.")] = None
    truncate_prompt_tokens: Annotated[
        int | None, Field(description="Cut texts that have more tokens, at their end; -1: than the model's window.")
    ] = None


def chat_images(body: ChatCompletionBody, caller: Caller) -> list[BroughtImage]:
    """Take the images out of the messages that bring their bytes along; references to their artifacts stay.

    Raises InvalidRequest, UnsupportedParameter, TooLarge with OpenAI's field in `param`.
    """
    if not any(type(message.get("content")) is list for message in body.messages):
        return []
    try:
        return take_images({"payload": {"messages": body.messages}}, caller.tenant)
    except PenstockError as error:
        raise in_openai_words(error) from None


def chat_request(body: ChatCompletionBody, caller: Caller, now_ms: int) -> InferenceRequest:
    """Raises InvalidRequest or UnsupportedParameter with OpenAI's field in `param`; Forbidden for the priority."""
    refuse_unsupported(body, HARMLESS_CHAT, _PENSTOCK_ONLY)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ: send one of them", param="max_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    payload: Json = {"messages": chat_messages(body.messages), "max_tokens": max_tokens}
    return _text_request(body, payload, caller, now_ms)


def completion_request(body: CompletionBody, caller: Caller, now_ms: int) -> InferenceRequest:
    """Raises as `chat_request`."""
    refuse_unsupported(body, HARMLESS_COMPLETION, _PENSTOCK_ONLY)
    if body.best_of not in (None, 1, body.n):
        raise UnsupportedParameter("best_of is not supported (accepted, without effect: 1 and n)", param="best_of")
    prompts = prompts_of(body)
    if len(prompts) > 1:
        raise UnsupportedParameter("prompt must be one prompt here: send a request for each", param="prompt")
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    payload: Json = {"max_tokens": 1 if body.only_prompt else max_tokens}
    payload["prompt" if isinstance(prompts[0], str) else "prompt_token_ids"] = prompts[0]
    if body.logprobs is not None:
        payload |= {"logprobs": True, "top_logprobs": body.logprobs}
    if body.echo and (body.logprobs is not None or not isinstance(prompts[0], str)):
        payload["prompt_logprobs"] = body.logprobs or 0  # of a prompt of tokens they hold its text
    return _text_request(body, payload, caller, now_ms, COMPLETION_WORDS)


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """The prompts of a body: texts, and lists of token ids. Raises InvalidRequest."""
    given: Any = body.prompt
    prompts: list[Any] = [given] if isinstance(given, str) or _tokens(given) else given
    if not prompts:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not _tokens(prompt):
            raise InvalidRequest(f"prompt[{number}] is neither text nor a list of token ids", param=f"prompt[{number}]")
    return prompts


def embedding_request(body: EmbeddingBody, caller: Caller, now_ms: int) -> InferenceRequest:
    """Raises as `chat_request`."""
    refuse_unsupported(body, HARMLESS_EMBEDDING, _PENSTOCK_ONLY)
    cut = -1 if body.truncate and body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
    payload: Json = {"dimensions": body.dimensions, "truncate_prompt_tokens": cut}
    if _tokens(body.input):
        payload["input_token_ids"] = [body.input]
    elif isinstance(body.input, list) and body.input and all(map(_tokens, body.input)):
        payload["input_token_ids"] = body.input
    else:
        payload["input"] = body.input
    return parse_in_openai_words("embedding", body, payload, caller, now_ms)


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in cast("list[Any]", value))


def _text_request(
    body: _TextBody, payload: Json, caller: Caller, now_ms: int, words: Words = MappingProxyType({})
) -> InferenceRequest:
    tier = tier_priority(body.service_tier)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream: true only", param="stream_options")
    given = body.model_fields_set
    for name in given & _AS_THEY_ARE:
        payload.setdefault(name, getattr(body, name))
    if payload.get("tools"):
        payload["tools"] = tools_of(payload["tools"])
    payload["top_k"] = body.limited_top_k
    more: Json = {"stream": bool(body.stream), "metadata": body.metadata}
    return parse_in_openai_words(
        "text_generation",
        body,
        payload,
        caller,
        now_ms,
        more=more,
        passed=body.passed_on,
        tier=tier,
        words=words,
    )


def tier_priority(tier: str | None) -> int | None:
    """The priority that a service tier stands for; None for the key's own. Raises UnsupportedParameter."""
    if tier not in TIER_PRIORITIES:
        raise UnsupportedParameter(
            f"service_tier must be one of {', '.join(filter(None, TIER_PRIORITIES))}", param="service_tier"
        )
    return TIER_PRIORITIES[tier]


def parse_in_openai_words(
    task: str,
    body: OpenAIBody,
    payload: Json,
    caller: Caller,
    now_ms: int,
    *,
    more: Mapping[str, Any] = MappingProxyType({}),
    passed: Mapping[str, Any] = MappingProxyType({}),
    tier: int | None = None,
    words: Words = MappingProxyType({}),
) -> InferenceRequest:
    """The request of a payload. `more` are other fields of it, `passed` those that go to a remote model as they are.

    Raises as `parse_request`, and Forbidden; with the fields named as the caller wrote them (`words`: see
    `in_openai_words`).
    """
    given = {} if body.penstock is None else body.penstock.model_dump(exclude_none=True)
    in_penstock = frozenset(given)
    for name in ("top_k", "min_p"):
        if name in given:
            payload[name] = given.pop(name)
    texts = _passed_on(passed) if passed else {}
    if texts and isinstance(given.get("extra", {}), dict):
        given["extra"] = {**given.get("extra", {}), **texts}
    fields: Json = {
        "task": task,
        "model": body.model,
        "user_id": body.user or None,
        "payload": payload,
        **more,
        **given,
    }
    fields.setdefault("priority", caller.priority(tier))
    try:
        request = parse_request(fields, tenant=caller.tenant, now_ms=now_ms)
        caller.priority(request.priority)
    except PenstockError as error:
        raise in_openai_words(error, in_penstock, words) from None
    return request


def _passed_on(passed: Mapping[str, Any]) -> dict[str, str]:
    """What goes to a remote model as it is, as JSON text; values that change nothing are left out."""
    return {
        # Not in escapes: they would count six bytes for a letter, and hide half a surrogate pair.
        name: json.dumps(value, ensure_ascii=False)
        for name, value in passed.items()
        if value is not None and value not in _PASSED_ON[name]
    }


_IMAGE = re.compile(r"^(messages\[\d+\]\.content\[\d+\])\.(?:image(?:\.\w+)?|image_url(?:\.url)?)$")
_IMAGE_OF_OWN = re.compile(r"^(\[\d+\]\.content\[\d+\])\.(?:image(?:\.\w+)?|image_url(?:\.url)?)$")
_DETAIL_OF_OWN = re.compile(r"^(\[\d+\]\.content\[\d+\])\.image_url\.detail$")
"""How an image is called within `messages`, and where a route calls these otherwise: as /v1/responses does."""


def in_openai_words(
    error: PenstockError, penstock_fields: frozenset[str] = frozenset(), words: Words = MappingProxyType({})
) -> PenstockError:
    """The same error with the field named as the caller wrote it."""
    native = error.param or ""
    param = _IMAGE.sub(r"\1.image_url.url", native.removeprefix("payload.").removeprefix("extra."))
    own = next((name for name in words if native == name or native.startswith((f"{name}.", f"{name}["))), None)
    if own is not None:
        place = _DETAIL_OF_OWN.sub(r"\1.detail", native.removeprefix(own))
        param = words[own] + _IMAGE_OF_OWN.sub(r"\1.image_url", place)
    elif not {native.split(".")[0], param}.isdisjoint(penstock_fields) and param not in _PASSED_ON:
        param = f"penstock.{param}"
    message = error.message.replace(native, param) if native else error.message
    return type(error)(message, param=param or None, details=error.details, retry_after_s=error.retry_after_s)
