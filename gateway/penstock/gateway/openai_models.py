"""The bodies of the OpenAI routes: what is read, what is harmless, what is refused, and the answers' shapes.

Every field that OpenAI documents is classified here. Supported ones are typed fields. A field outside of them passes
only with a value that would not change the output; with any other value, or unknown, it is `unsupported_parameter`.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from penstock.gateway.callers import Caller
from penstock.schemas.errors import InvalidRequest, PenstockError, UnsupportedParameter
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import DEFAULT_LIMITS, Limits, parse_request

Json = dict[str, Any]

TIER_PRIORITIES: dict[str | None, int | None] = {None: None, "auto": None, "default": 5, "priority": 2, "flex": 8}
COMPLETION_MAX_TOKENS = 16
"""What OpenAI takes for `max_tokens` on /v1/completions when it is left out."""


class Anything:
    """Marks a field whose every value is harmless: it never reaches the output."""


ANYTHING = Anything()
_HARMLESS: dict[str, Sequence[Any] | Anything] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "n": (1,),
    "prompt_cache_key": ANYTHING,
    "safety_identifier": ANYTHING,
}
HARMLESS_CHAT: dict[str, Sequence[Any] | Anything] = {
    **_HARMLESS,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": ANYTHING,
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "prompt_cache_retention": ANYTHING,
    "store": (False,),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "prompt_cache_options": (),
    "web_search_options": (),
}
HARMLESS_COMPLETION: dict[str, Sequence[Any] | Anything] = {
    **_HARMLESS,
    "logprobs": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
HARMLESS_EMBEDDING: dict[str, Sequence[Any] | Anything] = {}
_PENSTOCK_ONLY = {"top_k", "priority", "conversation_id", "ttl_ms", "pool", "deadline", "execution_timeout_ms"}


class StreamOptions(BaseModel):
    """`include_obfuscation` pads events against eavesdroppers: off is what Penstock does."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class PenstockOptions(BaseModel):
    """`extra_body={"penstock": {…}}`: what OpenAI's protocol has no field for. Checked with the native request."""

    model_config = ConfigDict(extra="forbid")

    priority: Any = Field(None, description="0 the most urgent; default 5")
    conversation_id: Any = Field(None, description="continue this conversation; messages are the new ones only")
    context: Any = Field(None, description="{max_tokens, last_turns}: how much of the conversation is used")
    ttl_ms: Any = Field(None, description="give up after this many milliseconds")
    deadline: Any = Field(None, description="the same as a time: RFC 3339 or Unix seconds")
    execution_timeout_ms: Any = None
    max_attempts: Any = None
    pool: Any = None
    requirements: Any = None
    session_id: Any = None
    extra: Any = Field(None, description="texts passed on to a remote engine")
    top_k: Any = None


class _Body(BaseModel):
    # Strict: "0.5" is no number. Unlisted fields are kept, to be judged by `_refuse_unsupported`.
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    user: str | None = None
    penstock: PenstockOptions | None = None


class _TextBody(_Body):
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionBody(_TextBody):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None


class CompletionBody(_TextBody):
    """The body of POST /v1/completions."""

    prompt: str | list[Any]


class EmbeddingBody(_Body):
    """The body of POST /v1/embeddings."""

    input: str | list[Any]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None


def chat_request(
    body: ChatCompletionBody, caller: Caller, now_ms: int, limits: Limits = DEFAULT_LIMITS
) -> InferenceRequest:
    """Raises InvalidRequest or UnsupportedParameter with OpenAI's field in `param`; Forbidden for the priority."""
    _refuse_unsupported(body, HARMLESS_CHAT)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ: send one of them", param="max_tokens")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    messages = [_message(message, number) for number, message in enumerate(body.messages)]
    return _text_request(body, {"messages": messages, "max_tokens": max_tokens}, caller, now_ms, limits)


def completion_request(
    body: CompletionBody, caller: Caller, now_ms: int, limits: Limits = DEFAULT_LIMITS
) -> InferenceRequest:
    """Raises as `chat_request`."""
    _refuse_unsupported(body, HARMLESS_COMPLETION)
    prompt = body.prompt
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise UnsupportedParameter("prompt must be one text: send a request for each prompt", param="prompt")
        prompt = prompt[0]
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return _text_request(body, {"prompt": prompt, "max_tokens": max_tokens}, caller, now_ms, limits)


def embedding_request(
    body: EmbeddingBody, caller: Caller, now_ms: int, limits: Limits = DEFAULT_LIMITS
) -> InferenceRequest:
    """Raises as `chat_request`."""
    _refuse_unsupported(body, HARMLESS_EMBEDDING)
    if isinstance(body.input, list) and any(isinstance(item, int | list) for item in body.input):
        raise UnsupportedParameter("input must be text or a list of texts, not tokens", param="input")
    payload = {"input": body.input, "dimensions": body.dimensions}
    return _parse("embedding", body, payload, caller, now_ms, limits)


def _text_request(body: _TextBody, payload: Json, caller: Caller, now_ms: int, limits: Limits) -> InferenceRequest:
    if body.service_tier not in TIER_PRIORITIES:
        raise UnsupportedParameter("service_tier must be auto, default, priority or flex", param="service_tier")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream: true only", param="stream_options")
    payload.update(temperature=body.temperature, top_p=body.top_p, stop=body.stop, seed=body.seed)
    return _parse("text_generation", body, payload, caller, now_ms, limits)


def _parse(task: str, body: _Body, payload: Json, caller: Caller, now_ms: int, limits: Limits) -> InferenceRequest:
    given = {} if body.penstock is None else body.penstock.model_dump(exclude_none=True)
    if "top_k" in given:
        payload["top_k"] = given.pop("top_k")
    fields: Json = {"task": task, "model": body.model, "user_id": body.user or None, "payload": payload, **given}
    tier = None
    if isinstance(body, _TextBody):
        tier = TIER_PRIORITIES[body.service_tier]
        fields.update(stream=bool(body.stream), metadata=body.metadata)
    fields.setdefault("priority", caller.priority(tier))
    try:
        request = parse_request(fields, tenant=caller.tenant, now_ms=now_ms, limits=limits)
        caller.priority(request.priority)
    except PenstockError as error:
        raise in_openai_words(error, frozenset(given)) from None
    return request


def in_openai_words(error: PenstockError, penstock_fields: frozenset[str] = frozenset()) -> PenstockError:
    """The same error with the field named as the caller wrote it."""
    native = error.param or ""
    param = native.removeprefix("payload.")
    if native.split(".")[0] in penstock_fields or param == "top_k":
        param = f"penstock.{param}"
    message = error.message.replace(native, param) if native else error.message
    return type(error)(message, param=param or None, details=error.details, retry_after_s=error.retry_after_s)


def _refuse_unsupported(body: _Body, harmless: Mapping[str, Sequence[Any] | Anything]) -> None:
    for name, value in (body.model_extra or {}).items():
        accepted = harmless.get(name)
        if accepted is None:
            hint = f': send it as extra_body={{"penstock": {{"{name}": …}}}}' if name in _PENSTOCK_ONLY else ""
            raise UnsupportedParameter(f"{name} is not supported{hint}", param=name)
        if value is None or isinstance(accepted, Anything) or any(_same(value, item) for item in accepted):
            continue
        only = ", ".join(repr(item) for item in accepted) or "null"
        raise UnsupportedParameter(f"{name} is not supported (accepted, without effect: {only})", param=name)


def _same(value: Any, accepted: Any) -> bool:
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)


def _message(message: Json, number: int) -> Json:
    """A message without what answers carry when clients send them back: nulls and empty lists."""
    role = message.get("role")
    if role in ("tool", "function"):
        raise UnsupportedParameter(f"messages of role {role} are not supported", param=f"messages[{number}].role")
    return {
        key: value for key, value in message.items() if key in ("role", "content") or not (value is None or value == [])
    }


# --- answers


def chat_completion(request_id: str, created: int, model: str, result: Json, tier: str | None) -> Json:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": result.get("text") or "", "refusal": None},
        "logprobs": None,
        "finish_reason": finish_reason(result),
    }
    return _answer(f"chatcmpl-{request_id}", "chat.completion", created, model, [choice], result, tier)


def completion(request_id: str, created: int, model: str, result: Json, tier: str | None) -> Json:
    choice = {"index": 0, "text": result.get("text") or "", "logprobs": None, "finish_reason": finish_reason(result)}
    return _answer(f"cmpl-{request_id}", "text_completion", created, model, [choice], result, tier)


def _answer(
    answer_id: str, kind: str, created: int, model: str, choices: list[Json], result: Json, tier: str | None
) -> Json:
    answer: Json = {"id": answer_id, "object": kind, "created": created, "choices": choices}
    answer["model"] = result.get("model") or model
    answer["usage"] = text_usage(result)
    answer["system_fingerprint"] = None
    if tier is not None:
        answer["service_tier"] = "default" if tier == "auto" else tier
    return answer


class ChunkWriter:
    """Makes the chunk objects of one stream, chat or completion."""

    def __init__(
        self, request_id: str, created: int, model: str, *, chat: bool, includes_usage: bool, tier: str | None
    ) -> None:
        self._chat = chat
        self._includes_usage = includes_usage
        self._head: Json = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        if tier is not None:
            self._head["service_tier"] = "default" if tier == "auto" else tier

    def opening(self) -> list[Json]:
        """What comes before any text: the role, on chat."""
        return [self._chunk({"role": "assistant", "content": "", "refusal": None}, None)] if self._chat else []

    def text(self, text: str) -> Json:
        return self._chunk({"content": text} if self._chat else text, None)

    def ending(self, result: Json) -> list[Json]:
        """The finish reason, then the usage if it was asked for."""
        chunks = [self._chunk({} if self._chat else "", finish_reason(result))]
        if self._includes_usage:
            chunks.append({**self._head, "choices": [], "usage": text_usage(result)})
        return chunks

    def _chunk(self, content: Json | str, reason: str | None) -> Json:
        choice: Json = {"index": 0, "delta" if self._chat else "text": content, "logprobs": None}
        choice["finish_reason"] = reason
        chunk: Json = {**self._head, "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = None
        return chunk


def embedding_list(model: str, result: Json, encoding_format: str | None) -> Json:
    """The answer of /v1/embeddings; `base64` is little-endian float32, as the stock client asks for."""
    vectors = cast("list[list[float]]", result.get("embeddings") or [])
    as_base64 = encoding_format == "base64"
    data: list[Json] = [
        {"object": "embedding", "index": index, "embedding": _base64_floats(vector) if as_base64 else vector}
        for index, vector in enumerate(vectors)
    ]
    usage = text_usage(result)
    counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]}
    return {"object": "list", "data": data, "model": result.get("model") or model, "usage": counts}


def finish_reason(result: Json) -> str:
    """One of the reasons that OpenAI's clients know."""
    reason = result.get("finish_reason")
    return reason if reason in ("stop", "length", "content_filter") else "stop"


def text_usage(result: Json) -> Json:
    usage: Json = result.get("usage") or {}
    prompt, produced = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    return {"prompt_tokens": prompt, "completion_tokens": produced, "total_tokens": prompt + produced}


def _base64_floats(vector: Sequence[float]) -> str:
    floats = array("f", vector)
    if sys.byteorder == "big":
        floats.byteswap()
    return base64.b64encode(floats.tobytes()).decode()
