"""The body of POST /v1/responses, and the request that it means. Fields are classified as in `openai_models`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field

from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.chat_bodies import (
    ANYTHING,
    FEW_ENTRIES,
    Anything,
    Json,
    OpenAIBody,
    StreamOptions,
    parse_in_openai_words,
    refuse_unsupported,
    tier_priority,
)
from penstock.schemas.bodies import ListOf
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.records import InferenceRequest

LOGPROBS = "message.output_text.logprobs"
HARMLESS_RESPONSE: dict[str, Sequence[Any] | Anything] = {
    "access_programs": (),
    "background": (False,),
    "context_management": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_key": ANYTHING,
    "prompt_cache_options": (),
    "prompt_cache_retention": ANYTHING,
    "safety_identifier": ANYTHING,
    "store": (False,),
    "truncation": ("disabled",),
}
WORDS = {
    "conversation_id": "conversation",
    "extra.reasoning_effort": "reasoning.effort",
    "extra.verbosity": "text.verbosity",
    "payload.logprobs": "include",
    "payload.max_tokens": "max_output_tokens",
    "payload.messages": "input",
    "payload.response_format": "text.format",
}
"""How this route calls the fields of the native request."""
_TEXT_PARTS = ("input_text", "output_text", "text")


class Reasoning(BaseModel):
    """`effort` goes to remote models."""

    model_config = ConfigDict(extra="forbid", strict=True)

    effort: str | None = None
    summary: None = None
    generate_summary: None = None


class TextOptions(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(OpenAIBody):
    """The body of POST /v1/responses."""

    input: Annotated[str | ListOf[dict[str, Any]], Field(description="Text, or messages, calls and their outputs.")]
    instructions: str | None = None
    conversation: Annotated[str | dict[str, Any] | None, Field(description="Its id, or {id}.")] = None
    previous_response_id: Annotated[str | None, Field(description="Not supported yet.")] = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: ListOf[str] | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, FEW_ENTRIES] = None
    metadata: Annotated[dict[str, str] | None, FEW_ENTRIES] = None
    service_tier: str | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Annotated[Reasoning | None, FEW_ENTRIES] = None
    text: Annotated[TextOptions | None, FEW_ENTRIES] = None


def responses_request(body: ResponsesBody, caller: Caller, now_ms: int) -> InferenceRequest:
    """Raises as `chat_request`."""
    refuse_unsupported(body, HARMLESS_RESPONSE)
    if body.previous_response_id is not None:
        raise UnsupportedParameter(
            "previous_response_id is not supported yet: name a conversation, or send the earlier items again",
            param="previous_response_id",
        )
    messages = list(_messages(body.input))
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    payload: Json = {
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": None if body.tools is None else [_tool(tool, number) for number, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": _response_format(body.text),
        **_logprobs(body),
    }
    passed = {
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "verbosity": None if body.text is None else body.text.verbosity,
    }
    more: Json = {"stream": bool(body.stream), "metadata": body.metadata}
    if (conversation := _conversation(body.conversation)) is not None:
        more["conversation_id"] = conversation
    priority = tier_priority(body.service_tier)
    return parse_in_openai_words(
        "text_generation", body, payload, caller, now_ms, more=more, passed=passed, tier=priority, words=WORDS
    )


def _conversation(value: str | dict[str, Any] | None) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) != {"id"}:
        raise InvalidRequest("conversation must be an id, or an object with its id", param="conversation")
    return value["id"]


def _logprobs(body: ResponsesBody) -> Json:
    """Asked for by `include`; what else can be included, no answer of ours has."""
    for name in body.include or ():
        if name not in (LOGPROBS, "reasoning.encrypted_content"):
            raise UnsupportedParameter(f"include: {name} is not supported", param="include")
    if LOGPROBS not in (body.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs}


def _messages(given: str | list[dict[str, Any]]) -> list[Json]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    for number, item in enumerate(given):
        where = f"input[{number}]"
        match item.get("type", "message"):
            case "message":
                messages.append(
                    {"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")}
                )
            case "function_call":
                call = {"id": item.get("call_id"), "type": "function"}
                call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
                if messages and "tool_calls" in messages[-1]:
                    messages[-1]["tool_calls"].append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                output = _content(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case other:
                raise UnsupportedParameter(f"{where}: items of type {str(other)[:50]} are not supported", param=where)
    return messages


def _content(value: Any, where: str) -> Any:
    """Text, or the texts of parts joined; the checks of the native body say what else is wrong."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in cast("list[Any]", value):
        kind: Any = cast("Json", part).get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise UnsupportedParameter(f"{where}: only parts of text are supported", param=where)
        if not isinstance(text := part.get("text"), str):
            raise InvalidRequest(f"{where}: a part of text has no text", param=where)
        texts.append(text)
    return "".join(texts)


def _tool(tool: Json, number: int) -> Json:
    if tool.get("type") != "function":
        raise UnsupportedParameter(
            f"tools[{number}]: only tools of type function are supported", param=f"tools[{number}].type"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(value: str | dict[str, Any] | None) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("type") != "function" or "name" not in value:
        raise UnsupportedParameter("tool_choice may name a function only", param="tool_choice")
    return {"type": "function", "function": {"name": value["name"]}}


def _response_format(text: TextOptions | None) -> Json | None:
    if text is None or text.format is None:
        return None
    if text.format.get("type") != "json_schema":
        return text.format
    return {"type": "json_schema", "json_schema": {name: v for name, v in text.format.items() if name != "type"}}
