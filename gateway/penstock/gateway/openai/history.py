"""Messages as clients send them back: what they add to an answer is dropped, what a chat template shows is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from penstock.schemas.bodies import Message

Json = dict[str, Any]

ECHOED = frozenset(
    {
        "annotations",
        "cache_control",
        "created_by",
        "end_turn",
        "extras",
        "id",
        "index",
        "object",
        "parsed",
        "phase",
        "prompt_cache_breakpoint",
        "provider_specific_fields",
        "reasoning_details",
        "reasoning_items",
        "status",
        "thinking_blocks",
        "type",
        "uuid",
    }
)
"""Fields that clients keep with an answer and send back, and marks for caches; no chat template reads them."""
_READ = frozenset({"reasoning", "refusal", "function_call"})
KNOWN_IN_MESSAGES = ECHOED | _READ | Message.__annotations__.keys()
_OF_CALLS, _OF_FUNCTIONS = ("id", "type", "function"), ("name", "arguments")
_MARKS = ("cache_control", "prompt_cache_breakpoint")
_THOUGHTS = {"thinking": "thinking", "reasoning": "text"}
"""Parts of a content that are thoughts, and where their text stands."""


def chat_messages(messages: Iterable[Json]) -> list[Json]:
    """Messages of a chat in the form of the native request. What no client is known to add is left, to be refused."""
    found: list[Json] = []
    for number, message in enumerate(messages):
        message = _message(message, f"call_{number}")
        if message.get("role") == "function":  # OpenAI's form before tools: it answers the call before it
            before: Sequence[Json] = found[-1].get("tool_calls") or () if found else ()
            message = {**message, "role": "tool", **({"tool_call_id": before[0]["id"]} if before else {})}
        found.append(message)
    return found


def _message(message: Json, call_id: str) -> Json:
    kept = {
        name: value
        for name, value in message.items()
        if name not in ECHOED and (name in ("role", "content") or not (value is None or value == []))
    }
    if len(kept) > 2 or type(kept.get("content")) is list or kept.get("role") == "assistant":
        _read_answer(kept, call_id)
    return kept


def _read_answer(message: Json, call_id: str) -> None:
    """Thoughts under their one name, a refusal as the answer that it is, calls as the native request has them."""
    thoughts, refusal, call = (message.pop(name, None) for name in ("reasoning", "refusal", "function_call"))
    if message.get("role") != "assistant":
        message.pop("reasoning_content", None)
        return
    if type(content := message.get("content")) is list:
        message["content"], shown = _without_thoughts(cast("list[Any]", content))
        thoughts = thoughts or shown
    if isinstance(thoughts, str) and thoughts:
        message.setdefault("reasoning_content", thoughts)
    if not message.get("content") and isinstance(refusal, str):
        message["content"] = refusal
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(one) for one in cast("list[Any]", calls)]
    elif call is not None:
        message["tool_calls"] = [_call({"id": call_id, "type": "function", "function": call})]


def _without_thoughts(parts: list[Any]) -> tuple[list[Any], str]:
    """The parts without thoughts, a refusal as text, and the text of the thoughts."""
    left: list[Any] = []
    thoughts: list[str] = []
    for part in parts:
        kind: Any = cast("Json", part).get("type") if isinstance(part, dict) else None
        if kind in _THOUGHTS:
            thoughts.append(str(part.get(_THOUGHTS[kind]) or ""))
        elif kind == "refusal":
            left.append({"type": "text", "text": part.get("refusal")})
        else:
            left.append(part)
    return left, "".join(thoughts)


def _call(call: Any) -> Any:
    """A call without what clients add."""
    if not isinstance(call, dict) or not isinstance(function := cast("Json", call).get("function"), dict):
        return call
    named = {"arguments": None, **_only(cast("Json", function), _OF_FUNCTIONS)}
    return {**_only(cast("Json", call), _OF_CALLS), "function": named}


def _only(values: Mapping[str, Any], names: Iterable[str]) -> Json:
    return {name: values[name] for name in names if name in values}


def tools_of(tools: list[Json]) -> list[Json]:
    """Tools without marks for caches of other servers."""
    return [{name: _unmarked(value) for name, value in _unmarked(tool).items()} for tool in tools]


def _unmarked(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in cast("Json", value).items() if name not in _MARKS}


def thoughts_of(item: Json) -> str:
    """The text of a reasoning item of /v1/responses: its content, else its summary."""
    for name in ("content", "summary"):
        parts: Any = item.get(name)
        texts = [
            text
            for part in (cast("list[Any]", parts) if isinstance(parts, list) else ())
            if isinstance(part, dict) and isinstance(text := cast("Json", part).get("text"), str)
        ]
        if texts:
            return "\n".join(texts)
    return ""
