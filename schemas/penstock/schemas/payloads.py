"""Payloads in their normal form: what the types of `bodies` let several forms have, as the records carry it.

Here is also what depends on `LIMITS` and what concerns several fields at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, cast

from penstock.schemas.errors import InvalidRequest, TooLarge
from penstock.schemas.finite_json import Flaw, loads_finite
from penstock.schemas.ids import check_conversation_id
from penstock.schemas.limits import LIMITS, MAX_STOP_CHARS
from penstock.schemas.message_parts import KEPT_ROLES, SEEN_ROLES, content_of
from penstock.schemas.plain import text_bytes

Payload = dict[str, Any]

CHOICES = frozenset({"none", "auto", "required"})
SCHEMA_NAME = "response"
"""What a schema is called that came without a name."""
TOKEN_BYTES = 4
"""What a token id counts towards `max_text_bytes`."""


def text_payload(payload: Payload) -> Payload:
    """The normal form of a valid payload of text_generation. Raises InvalidRequest, UnsupportedParameter, TooLarge."""
    if ("messages" in payload) + ("prompt" in payload) + ("prompt_token_ids" in payload) != 1:
        raise InvalidRequest("payload needs messages or prompt, one of the two", param="payload.messages")
    if "messages" in payload:
        payload["messages"] = _messages(payload["messages"])
    if "prompt" in payload:
        size_within(payload["prompt"], "payload.prompt")
    if "prompt_token_ids" in payload and len(payload["prompt_token_ids"]) * TOKEN_BYTES > LIMITS.max_text_bytes:
        raise _too_long("payload.prompt_token_ids")
    if "stop" in payload:
        payload["stop"] = _stops(payload["stop"])
    if payload.get("top_logprobs") and not payload.get("logprobs"):
        raise InvalidRequest("payload.top_logprobs needs logprobs: true", param="payload.top_logprobs")
    for name in payload.keys() & _FORMS.keys():
        payload[name] = _FORMS[name](payload[name], f"payload.{name}")
    return payload


def embedding_payload(payload: Payload) -> Payload:
    """The same for embedding."""
    given, tokens = payload.get("input"), payload.get("input_token_ids")
    inputs: list[Any] = [given] if isinstance(given, str) else given or []
    payload["input"] = inputs
    param = "payload.input"
    if (tokens is None) == (not inputs):
        raise InvalidRequest(f"{param} must be text or a list of at least one text", param=param)
    if len(inputs) > LIMITS.max_inputs or len(tokens or ()) > LIMITS.max_inputs:
        raise TooLarge(f"{param} has more than {LIMITS.max_inputs} texts", param=param)
    for number, item in enumerate(inputs):
        if not size_within(item, f"{param}[{number}]"):
            raise InvalidRequest(f"{param}[{number}] is empty", param=f"{param}[{number}]")
    for number, item in enumerate(tokens or ()):
        if not item:
            raise InvalidRequest(f"{param}[{number}] is empty", param=f"{param}[{number}]")
    if sum(map(text_bytes, inputs)) + TOKEN_BYTES * sum(map(len, tokens or ())) > LIMITS.max_text_bytes:
        raise _too_long(param)
    if payload.get("truncate_prompt_tokens") == 0:
        raise InvalidRequest(
            "payload.truncate_prompt_tokens must be -1 or at least 1", param="payload.truncate_prompt_tokens"
        )
    return payload


def summarization_payload(payload: Payload) -> Payload:
    """The same for summarization."""
    if "text" in payload and "conversation_id" in payload:
        raise InvalidRequest("payload needs text or conversation_id, one of the two", param="payload.text")
    if "text" in payload:
        size_within(payload["text"], "payload.text")
        if not payload["text"].strip():
            raise InvalidRequest("payload.text is empty", param="payload.text")
        if "through_offset" in payload:
            raise InvalidRequest("payload.through_offset goes with conversation_id", param="payload.through_offset")
    elif "conversation_id" in payload:
        payload["conversation_id"] = check_conversation_id(payload["conversation_id"], "payload.conversation_id")
    return payload


def items_payload(payload: Payload) -> Payload:
    """The same for conversation_items."""
    if not payload.get("messages"):
        raise InvalidRequest("payload needs messages", param="payload.messages")
    payload["messages"] = _messages(payload["messages"], KEPT_ROLES)
    return payload


def size_within(text: str, param: str) -> int:
    """Its bytes. Raises TooLarge, and InvalidRequest for what is no text."""
    try:
        size = text_bytes(text)
    except UnicodeEncodeError as error:
        raise lone_surrogate(param) from error
    if size > LIMITS.max_text_bytes:
        raise _too_long(param)
    return size


def lone_surrogate(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} holds a lone surrogate, which is no text", param=param)


def _too_long(param: str) -> TooLarge:
    return TooLarge(f"{param} has more than {LIMITS.max_text_bytes} bytes", param=param)


def _stops(value: str | list[str]) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > LIMITS.max_stops or not all(0 < len(text) <= MAX_STOP_CHARS for text in stops):
        raise InvalidRequest(
            f"payload.stop must be text or a list of at most {LIMITS.max_stops} texts, each of 1 to {MAX_STOP_CHARS} "
            "characters",
            param="payload.stop",
        )
    for text in stops:
        size_within(text, "payload.stop")
    return stops


# --- messages


def _messages(messages: list[Payload], showing: Set[str] = SEEN_ROLES) -> list[Payload]:
    """In their normal form. `showing`: whose may have images."""
    param = "payload.messages"
    if len(messages) > LIMITS.max_messages:
        raise TooLarge(f"{param} has more than {LIMITS.max_messages} messages", param=param)
    size = 0
    for number, message in enumerate(messages):
        place = f"{param}[{number}]"
        content = message.get("content")
        if message["role"] == "developer":
            message["role"] = "system"
        if message.get("parts"):  # as the records have it: the content is the text of its parts
            content = message["content"] = content_of(message["parts"], message, f"{place}.parts", showing)
        elif type(content) is not str:
            content = message["content"] = _content(content, message, f"{place}.content", showing)
        size += size_within(content, f"{place}.content")
        if len(message) > 2 or message["role"] == "tool":
            size += _of_tools(message, place) + _of_reasoning(message, place)
    if size > LIMITS.max_text_bytes:
        raise _too_long(param)
    return messages


def _content(value: list[Payload] | None, message: Payload, param: str, showing: Set[str]) -> str:
    """The text of its parts; images among them are in the message's `parts`."""
    if value is None:
        if message["role"] in ("assistant", "tool"):  # as clients send back an answer without text
            return ""
        raise InvalidRequest(f"{param} must be text or a list of parts", param=param)
    return content_of(value, message, param, showing)


def _of_tools(message: Payload, param: str) -> int:
    """The bytes of what a message has about tools, in its normal form; nulls and empty lists are taken out."""
    for name in [name for name, value in message.items() if value is None or value == []]:
        del message[name]
    calls: list[Payload] = message.get("tool_calls", [])
    if calls and message["role"] != "assistant":
        raise InvalidRequest(f"{param}.tool_calls: only an assistant asks for tools", param=f"{param}.tool_calls")
    if ("tool_call_id" in message) != (message["role"] == "tool"):
        raise InvalidRequest(
            f"{param}.tool_call_id goes with role tool, and must be there", param=f"{param}.tool_call_id"
        )
    size = 0
    for number, call in enumerate(calls):
        call["type"] = "function"
        for text in (call["id"], call["function"]["name"], call["function"]["arguments"]):
            size += size_within(text, f"{param}.tool_calls[{number}]")
    return size


def _of_reasoning(message: Payload, param: str) -> int:
    """The bytes of what an assistant thought."""
    if "reasoning_content" not in message:
        return 0
    param = f"{param}.reasoning_content"
    if message["role"] != "assistant":
        raise InvalidRequest(f"{param} goes with role assistant", param=param)
    return size_within(message["reasoning_content"], param)


# --- what Avro carries as JSON text


def _json_text(value: Any, param: str) -> str:
    """An object as JSON text; text that is there already must be an object's."""
    if isinstance(value, str):
        size_within(value, param)
    try:
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        if not isinstance(loads_finite(text), dict):
            raise ValueError
    except Flaw as flaw:
        raise flaw.refusal(param, param) from None
    except (ValueError, RecursionError, TypeError) as error:
        raise InvalidRequest(f"{param} must be a JSON object or its text", param=param) from error
    size_within(text, param)
    return text


def _tools(tools: list[Payload], param: str) -> list[Payload]:
    if len(tools) > LIMITS.max_tools:
        raise TooLarge(f"{param} has more than {LIMITS.max_tools} tools", param=param)
    for number, tool in enumerate(tools):
        tool["type"] = "function"
        function, place = tool["function"], f"{param}[{number}].function"
        if function.get("parameters") is not None:
            function["parameters"] = _json_text(function["parameters"], f"{place}.parameters")
        for name in ("name", "description"):
            if function.get(name) is not None:
                size_within(function[name], f"{place}.{name}")
        tool["function"] = _without_nulls(function)
    if len(json.dumps(tools)) > LIMITS.max_text_bytes:
        raise _too_long(param)
    return tools


def _tool_choice(value: Any, param: str) -> str:
    if isinstance(value, str) and value in CHOICES:
        return value
    if isinstance(value, str) and not value.startswith("{"):
        raise InvalidRequest(f"{param} must be none, auto, required or an object that names a tool", param=param)
    return _json_text(value, param)


def _response_format(value: Payload, param: str) -> Payload:
    value = _with_json_schema(_without_nulls(value), param)
    has_schema = "json_schema" in value
    if has_schema != (value["type"] == "json_schema"):
        raise InvalidRequest(
            f"{param}.json_schema goes with type json_schema, and must be there", param=f"{param}.json_schema"
        )
    if has_schema:
        value["json_schema"] = _json_text(value["json_schema"], f"{param}.json_schema")
    return value


def _with_json_schema(value: Payload, param: str) -> Payload:
    """The same form as OpenAI writes it, if it has a `schema` of its own, as llama.cpp and others write it."""
    if "schema" not in value:
        return value
    if value["type"] == "text" or "json_schema" in value:
        text = f"{param}.schema goes with type json_object, or json_schema without {param}.json_schema"
        raise InvalidRequest(text, param=f"{param}.schema")
    schema = loads_finite(_json_text(value["schema"], f"{param}.schema"))
    return {"type": "json_schema", "json_schema": {"name": SCHEMA_NAME, "schema": schema}}


def _without_nulls(values: Payload) -> Payload:
    return {name: value for name, value in values.items() if value is not None}


_FORMS: dict[str, Callable[[Any, str], Any]] = {
    "tools": _tools,
    "tool_choice": _tool_choice,
    "response_format": _response_format,
}


# --- what goes beyond plain text

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"}, {"type": "text", "json_schema": None}),
    "prompt_token_ids": (),
    "input_token_ids": (),
    "truncate_prompt_tokens": (),
}
"""The fields that not every engine of ours supports, each with the values that change nothing."""

TEXT_DEFAULTS = frozenset(
    {
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop",
        "seed", "n", "logprobs", "top_logprobs", "response_format",
    }
)  # fmt: skip
EMBEDDING_DEFAULTS = frozenset({"dimensions"})
"""The fields of a payload for which a model may have a default, by task."""

OF_OTHER_SERVERS = frozenset(
    {"repetition_penalty", "min_tokens", "ignore_eos", "truncate_prompt_tokens", "chat_template_kwargs"}
)
"""Fields that vLLM, SGLang and others have beyond OpenAI's."""
PASSED_ON = OF_OTHER_SERVERS | {"logit_bias", "parallel_tool_calls", "prediction", "reasoning_effort", "verbosity"}
"""Fields of OpenAI and of other servers that travel in `extra`, as JSON text."""

TOOL_MESSAGES = "tool_messages"
"""Stands for messages of and for tools, where a table lists what an engine knows."""

KNOWN: dict[str, frozenset[str]] = {
    "text": frozenset(
        {
            "min_p", "presence_penalty", "frequency_penalty", "n", "logprobs", "top_logprobs", "prompt_logprobs",
            "tools", "tool_choice", "response_format", "prompt_token_ids", "logit_bias", "parallel_tool_calls",
            "reasoning_effort", TOOL_MESSAGES, *OF_OTHER_SERVERS,
        }
    ),
    "embedding": frozenset({"input_token_ids", "truncate_prompt_tokens"}),
}  # fmt: skip
"""By engine of ours: what it knows of NEUTRAL and PASSED_ON. Remote and managed models know all."""


_NOTHING: frozenset[str] = frozenset()
OF_THE_TASK: dict[str, frozenset[str]] = {"image_generation": frozenset({"n"}), "image_editing": frozenset({"n"})}
"""By task: those that are a field of its own, with a meaning of its own."""


def only_remote(task: str, payload: Payload, extra: dict[str, str], engine: str = "") -> Iterator[str]:
    """The fields of a request that only a remote model can serve, not an `engine` of ours, as callers write them."""
    known = KNOWN.get(engine, _NOTHING) | OF_THE_TASK.get(task, _NOTHING)
    if not payload.keys().isdisjoint(NEUTRAL):
        for name, neutral in NEUTRAL.items():
            if name not in known and (value := payload.get(name)) is not None and value not in neutral:
                yield f"payload.{name}"
    if TOOL_MESSAGES not in known:
        yield from _tool_messages(cast("list[Payload] | None", payload.get("messages")) or ())
    if extra:
        yield from (f"extra.{name}" for name in extra if name in PASSED_ON and name not in known)


def _tool_messages(messages: Sequence[Payload]) -> Iterator[str]:
    for number, message in enumerate(messages):
        if message["role"] == "tool" or message.get("tool_calls"):
            yield (
                f"payload.messages[{number}].role"
                if message["role"] == "tool"
                else f"payload.messages[{number}].tool_calls"
            )
