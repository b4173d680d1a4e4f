"""The JSON form of requests: strict reading with the field at fault named, and back. One validation for all ways in."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from penstock.schemas.errors import BadJson, InvalidRequest, TooLarge, UnsupportedParameter, UnsupportedTask
from penstock.schemas.ids import (
    DEFAULT_TENANT,
    check_conversation_id,
    check_request_id,
    check_tenant,
    is_conversation_id,
    is_request_id,
    is_tenant,
    new_request_id,
)
from penstock.schemas.records import PAYLOAD_FIELDS, ContextLimits, InferenceRequest, OutputSpec, Record, Requirements

BUILT_TASKS = frozenset({"text_generation", "embedding"})
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one request may hold. Bytes are of UTF-8."""

    max_text_bytes: int = 500_000
    max_messages: int = 2_000
    max_tokens: int = 1_000_000
    max_inputs: int = 2_048
    max_stops: int = 16
    max_stop_chars: int = 200
    max_ttl_ms: int = 86_400_000
    default_ttl_ms: int = 3_600_000
    max_attempts: int = 10
    max_map_entries: int = 64
    max_map_bytes: int = 16_384
    max_record_bytes: int = 1_000_000


DEFAULT_LIMITS = Limits()

_Check = Callable[[Any, str, Limits], Any]
_INT, _LONG = 2**31 - 1, 2**63 - 1  # the largest values of Avro's numbers
_POOL = re.compile(r"[A-Za-z0-9_-]{1,63}")


def parse_request(
    body: Mapping[str, Any],
    *,
    tenant: str | None = None,
    request_id: str | Callable[[], str] | None = None,
    now_ms: int,
    limits: Limits = DEFAULT_LIMITS,
) -> InferenceRequest:
    """A validated request from its JSON form. `tenant` overrides the body's; `request_id` is for one that has none (or
    what makes it then).

    Raises InvalidRequest, UnsupportedParameter, UnsupportedTask, TooLarge, each with the field in `param`.
    """
    _known(body, _REQUEST_FIELDS, "")
    task = body.get("task")
    if not isinstance(task, str) or task not in PAYLOAD_FIELDS:
        raise InvalidRequest(f"task must be one of {', '.join(PAYLOAD_FIELDS)}", param="task")
    payload = body.get("payload")
    if not isinstance(payload, Mapping):
        raise InvalidRequest("payload must be an object", param="payload")
    values: dict[str, Any] = {"task": task, task: _payload(task, cast("Mapping[str, Any]", payload), limits)}
    own_id, own_tenant = body.get("request_id"), body.get("tenant")
    if own_id is None:
        own_id = request_id() if callable(request_id) else request_id or new_request_id()
    values["request_id"] = check_request_id(own_id)
    values["tenant"] = check_tenant(tenant or (DEFAULT_TENANT if own_tenant is None else own_tenant))
    values["created_at"] = now_ms
    for name, value in body.items():
        if value is not None and (check := _REQUEST_CHECKS.get(name)) is not None:
            values[name] = check(value, name, limits)
    if (deadline := body.get("deadline")) is not None:
        values["ttl_ms"] = _ttl_of_deadline(deadline, now_ms, limits)
    request = InferenceRequest(**values)
    _across_fields(request)
    return request


def parse_request_bytes(
    value: bytes,
    *,
    tenant: str | None = None,
    request_id: str | Callable[[], str] | None = None,
    now_ms: int,
    limits: Limits = DEFAULT_LIMITS,
) -> InferenceRequest:
    """As `parse_request`, from the bytes of a record. Raises BadJson too."""
    if len(value) > limits.max_record_bytes:
        raise TooLarge(f"the record has {len(value)} bytes; the limit is {limits.max_record_bytes}")
    try:
        body: Any = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadJson(f"not JSON: {error}"[:200]) from error
    if not isinstance(body, dict):
        raise BadJson("not a JSON object")
    return parse_request(
        cast("dict[str, Any]", body), tenant=tenant, request_id=request_id, now_ms=now_ms, limits=limits
    )


def validate_request(request: InferenceRequest, limits: Limits = DEFAULT_LIMITS) -> None:
    """Hold an Avro arrival to the same rules. Raises as `parse_request`."""
    if not is_plain(request, limits):
        _validate(request, limits)


def is_plain(request: InferenceRequest, limits: Limits) -> bool:
    """Whether a request has only what most requests have, and all of it is good: one look instead of thirty.

    False says nothing: then each field is checked by itself, which names the one at fault.
    """
    task, text, embedding = request.task, request.text_generation, request.embedding
    try:
        return (
            request.image_generation is None
            and request.image_editing is None
            and request.image_to_text is None
            and request.image_processing is None
            and request.summarization is None
            and request.callback_url is None
            and request.output is None
            and request.context is None
            and request.requirements is None
            and not request.extra
            and not request.metadata
            and request.pool is None
            and request.user_id is None
            and request.session_id is None
            and request.execution_timeout_ms is None
            and type(request.stream) is bool
            and type(request.priority) is int
            and 0 <= request.priority <= 1_000
            and type(request.max_attempts) is int
            and 1 <= request.max_attempts <= limits.max_attempts
            and ((ttl := request.ttl_ms) is None or (type(ttl) is int and 1 <= ttl <= limits.max_ttl_ms))
            and ((model := request.model) is None or (0 < len(model) <= 200 and str.isascii(model)))
            and is_request_id(request.request_id)
            and is_tenant(request.tenant)
            and (
                (
                    task == "text_generation"
                    and text is not None
                    and embedding is None
                    and _plain_text(text, request.conversation_id, limits)
                )
                or (
                    task == "embedding"
                    and embedding is not None
                    and text is None
                    and request.conversation_id is None
                    and _plain_embedding(embedding, limits)
                )
            )
        )
    except (TypeError, AttributeError, ValueError, KeyError):
        return False


_TEXT_WORDS = frozenset({"messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "stop", "seed"})
_ROLES = frozenset(ROLES)


def _plain_text(payload: dict[str, Any], conversation_id: str | None, limits: Limits) -> bool:
    get = payload.get
    messages, prompt, tokens, warmth = get("messages"), get("prompt"), get("max_tokens"), get("temperature")
    if not (
        payload.keys() <= _TEXT_WORDS
        and get("top_p") is None
        and get("top_k") is None
        and get("stop") is None
        and ((seed := get("seed")) is None or (type(seed) is int and -_LONG - 1 <= seed <= _LONG))
        and (tokens is None or (type(tokens) is int and 1 <= tokens <= limits.max_tokens))
        and (warmth is None or (type(warmth) is float and 0 <= warmth <= 2))
        and (conversation_id is None or is_conversation_id(conversation_id))
    ):
        return False
    if messages is None:
        return conversation_id is None and type(prompt) is str and text_bytes(prompt) <= limits.max_text_bytes
    if prompt is not None or type(messages) is not list or not 0 < len(messages) <= limits.max_messages:
        return False
    size = 0
    for message in cast("list[dict[str, Any]]", messages):
        if message["role"] not in _ROLES or message.get("name") is not None or len(message) > 2 + ("name" in message):
            return False
        size += text_bytes(message["content"])
    return size <= limits.max_text_bytes


def _plain_embedding(payload: dict[str, Any], limits: Limits) -> bool:
    inputs: Any = payload["input"]
    if len(payload) > 1 + ("dimensions" in payload) or payload.get("dimensions") is not None:
        return False
    if type(inputs) is not list or not 0 < len(inputs) <= limits.max_inputs:
        return False
    size = 0
    for text in cast("list[str]", inputs):
        if not text:
            return False
        size += text_bytes(text)
    return size <= limits.max_text_bytes


def text_bytes(text: str) -> int:
    """Its length in UTF-8. Raises UnicodeEncodeError for a lone surrogate."""
    return len(text) if str.isascii(text) else len(text.encode())


def _validate(request: InferenceRequest, limits: Limits) -> None:
    check_request_id(request.request_id)
    check_tenant(request.tenant)
    if request.task not in PAYLOAD_FIELDS:
        raise UnsupportedTask(f"the task {request.task} is not known to this release", param="task")
    given = [name for name in PAYLOAD_FIELDS if getattr(request, name) is not None]
    if given != [request.task]:
        raise InvalidRequest(f"exactly the payload {request.task} must be set, not {given or 'none'}", param="payload")
    _payload(request.task, {name: value for name, value in request.payload.items() if value is not None}, limits)
    for name, check in _REQUEST_CHECKS.items():
        value = getattr(request, name)
        if value is not None:
            check(value.to_dict() if isinstance(value, Record) else value, name, limits)
    _across_fields(request)


def _across_fields(request: InferenceRequest) -> None:
    if request.callback_url is not None:
        raise UnsupportedParameter("callback_url is not supported yet", param="callback_url")
    if request.output is not None:
        raise UnsupportedParameter("output is not supported yet", param="output")
    if request.conversation_id is not None and request.task != "text_generation":
        raise UnsupportedParameter(f"conversation_id does not go with {request.task}", param="conversation_id")
    if request.context is not None and request.conversation_id is None:
        raise InvalidRequest("context needs a conversation_id", param="context")
    if request.context is not None and request.context.summary:
        raise UnsupportedParameter("context.summary is not supported yet", param="context.summary")
    if request.conversation_id is not None and request.payload.get("messages") is None:
        raise InvalidRequest("a conversation's turn needs messages", param="payload.messages")


def request_to_json(request: InferenceRequest) -> dict[str, Any]:
    """The JSON form; unset fields are left out."""
    values = request.to_dict()
    payload = values.pop(request.task, None) or {}
    for name in PAYLOAD_FIELDS:
        values.pop(name, None)
    found = {name: value for name, value in values.items() if value is not None and value != {}}
    found["payload"] = {name: value for name, value in payload.items() if value is not None}
    return found


# A `deadline` becomes a time to live, which is another one at each repeat.
_NOT_CONTENT = frozenset({"request_id", "created_at", "tenant", "ttl_ms"})


def content_hash(request: InferenceRequest) -> str:
    """Hex digest of what was asked for, whenever and under which id: equal for a repeat, different for another body."""
    values = {k: v for k, v in request_to_json(request).items() if k not in _NOT_CONTENT}
    return hashlib.sha256(json.dumps(_bare(values), sort_keys=True).encode()).hexdigest()


def _bare(value: Any) -> Any:
    """Without nulls at any depth: Avro writes what JSON left out."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {key: _bare(item) for key, item in found.items() if item is not None}
    if isinstance(value, list):
        return [_bare(item) for item in cast("list[Any]", value)]
    return value


# --- checks of single values: each returns the value in its normal form or raises with the field named


def _known(body: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    for name in body:
        if name not in known:
            # A caller's own name goes into an error record: it must be text there, and not the whole record again.
            shown = path + name[:100].encode(errors="backslashreplace").decode()
            raise UnsupportedParameter(f"{shown} is not supported", param=shown)


def _integer(low: int, high: int | None = None) -> _Check:
    def check(value: Any, param: str, limits: Limits) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            upper = "" if high is None else f" and at most {high}"
            raise InvalidRequest(f"{param} must be an integer of at least {low}{upper}", param=param)
        return value

    return check


def _number(low: float, high: float, *, above: bool = False) -> _Check:
    def check(value: Any, param: str, limits: Limits) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not good or (above and value == low):
            raise InvalidRequest(f"{param} must be {'above' if above else 'from'} {low:g} to {high:g}", param=param)
        return float(value)

    return check


def _text(max_chars: int) -> _Check:
    def check(value: Any, param: str, limits: Limits) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= max_chars:
            raise InvalidRequest(f"{param} must be text of 1 to {max_chars} characters", param=param)
        return _utf8(value, param)

    return check


def _long_text(value: Any, param: str, limits: Limits) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be text", param=param)
    if (len(value) if value.isascii() else len(_utf8(value, param).encode())) > limits.max_text_bytes:
        raise TooLarge(f"{param} has more than {limits.max_text_bytes} bytes", param=param)
    return value


def _utf8(value: str, param: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} holds a lone surrogate, which is no text", param=param) from error
    return value


def _boolean(value: Any, param: str, limits: Limits) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{param} must be true or false", param=param)
    return value


def _conversation(value: Any, param: str, limits: Limits) -> str:
    return check_conversation_id(value)


def _pool(value: Any, param: str, limits: Limits) -> str:
    if not isinstance(value, str) or not _POOL.fullmatch(value):  # it becomes part of topics' names
        raise InvalidRequest("pool must match [A-Za-z0-9_-]{1,63}", param=param)
    return value


def _string_map(value: Any, param: str, limits: Limits) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be an object of texts", param=param)
    found = cast("Mapping[Any, Any]", value)
    if not all(isinstance(key, str) and isinstance(item, str) for key, item in found.items()):
        raise InvalidRequest(f"{param} must hold only texts", param=param)
    size = sum(len(_utf8(text, param).encode()) for pair in found.items() for text in pair)
    if len(found) > limits.max_map_entries or size > limits.max_map_bytes:
        raise TooLarge(
            f"{param} has more than {limits.max_map_entries} entries or {limits.max_map_bytes} bytes", param=param
        )
    return dict(found)


def _ttl(value: Any, param: str, limits: Limits) -> int:
    return _integer(1, limits.max_ttl_ms)(value, param, limits)


def _ttl_of_deadline(value: Any, now_ms: int, limits: Limits) -> int:
    """Milliseconds from now to an RFC 3339 time or Unix seconds; one that has passed leaves 1 ms: it expires."""
    try:
        if isinstance(value, bool):
            raise ValueError
        if isinstance(value, int | float):
            at_ms = value * 1000
        else:
            at = datetime.fromisoformat(value)
            if at.tzinfo is None:
                raise ValueError("no offset")  # it would be another time on each machine
            at_ms = at.timestamp() * 1000
        ttl_ms = int(at_ms - now_ms)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest("deadline must be an RFC 3339 time or Unix seconds", param="deadline") from error
    if ttl_ms > limits.max_ttl_ms:
        raise InvalidRequest(f"deadline lies more than {limits.max_ttl_ms} ms ahead", param="deadline")
    return max(1, ttl_ms)


def _attempts(value: Any, param: str, limits: Limits) -> int:
    return _integer(1, limits.max_attempts)(value, param, limits)


def _fields(value: Any, param: str, limits: Limits, checks: Mapping[str, _Check]) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be an object", param=param)
    found = cast("Mapping[str, Any]", value)
    _known(found, frozenset(checks), f"{param}.")
    given = {name: item for name, item in found.items() if item is not None}
    return {name: checks[name](item, f"{param}.{name}", limits) for name, item in given.items()}


def _context(value: Any, param: str, limits: Limits) -> ContextLimits:
    checks = {"max_tokens": _integer(1, _INT), "last_turns": _integer(0, _INT), "summary": _boolean}
    return ContextLimits(**_fields(value, param, limits, checks))


def _requirements(value: Any, param: str, limits: Limits) -> Requirements:
    checks = {"vram_bytes": _integer(0, _LONG), "cpu_memory_bytes": _integer(0, _LONG)}
    return Requirements(**_fields(value, param, limits, checks))


def _output(value: Any, param: str, limits: Limits) -> OutputSpec:
    return OutputSpec(**_fields(value, param, limits, {"store": _text(63), "prefix": _text(200)}))


_REQUEST_CHECKS: dict[str, _Check] = {
    "priority": _integer(0, 1_000),
    "model": _text(200),
    "pool": _pool,
    "user_id": _text(200),
    "session_id": _text(200),
    "conversation_id": _conversation,
    "context": _context,
    "extra": _string_map,
    "stream": _boolean,
    "ttl_ms": _ttl,
    "execution_timeout_ms": _integer(1, 86_400_000),
    "max_attempts": _attempts,
    "requirements": _requirements,
    "output": _output,
    "callback_url": _text(2_000),
    "metadata": _string_map,
}
_REQUEST_FIELDS = frozenset({*_REQUEST_CHECKS, "task", "payload", "request_id", "tenant", "deadline", "created_at"})


# --- payloads


def _payload(task: str, payload: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    if task not in BUILT_TASKS:
        raise UnsupportedTask(f"the task {task} is not built yet", param="task")
    return _text_payload(payload, limits) if task == "text_generation" else _embedding_payload(payload, limits)


def _max_tokens(value: Any, param: str, limits: Limits) -> int:
    return _integer(1, limits.max_tokens)(value, param, limits)


def _stops(value: Any, param: str, limits: Limits) -> list[str]:
    found: Any = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > limits.max_stops:
        raise InvalidRequest(f"{param} must be text or a list of at most {limits.max_stops} texts", param=param)
    return [_text(limits.max_stop_chars)(item, param, limits) for item in cast("list[Any]", found)]


_TEXT_CHECKS: dict[str, _Check] = {
    "max_tokens": _max_tokens,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _integer(1, 1_000_000),
    "stop": _stops,
    "seed": _integer(-_LONG - 1, _LONG),
    "prompt": _long_text,
}


def _text_payload(payload: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    _known(payload, _TEXT_FIELDS, "payload.")
    given = {name: value for name, value in payload.items() if value is not None}
    if ("messages" in given) == ("prompt" in given):
        raise InvalidRequest("payload needs messages or prompt, one of the two", param="payload.messages")
    found = {n: check(given[n], f"payload.{n}", limits) for n, check in _TEXT_CHECKS.items() if n in given}
    if "messages" in given:
        found["messages"] = _messages(given["messages"], limits)
    return found


_TEXT_FIELDS = frozenset({*_TEXT_CHECKS, "messages"})


def _messages(value: Any, limits: Limits) -> list[dict[str, Any]]:
    param = "payload.messages"
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{param} must be a list of at least one message", param=param)
    items = cast("list[Any]", value)
    if len(items) > limits.max_messages:
        raise TooLarge(f"{param} has more than {limits.max_messages} messages", param=param)
    found = [_message(item, f"{param}[{number}]", limits) for number, item in enumerate(items)]
    if sum(len(message["content"].encode()) for message in found) > limits.max_text_bytes:
        raise TooLarge(f"{param} has more than {limits.max_text_bytes} bytes", param=param)
    return found


def _message(value: Any, param: str, limits: Limits) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{param} must be an object with role and content", param=param)
    message = cast("Mapping[str, Any]", value)
    _known(message, frozenset({"role", "content", "name"}), f"{param}.")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise InvalidRequest(f"{param}.role must be one of {', '.join(ROLES)}", param=f"{param}.role")
    found = {"role": role, "content": _content(message.get("content"), f"{param}.content", limits)}
    if message.get("name") is not None:
        found["name"] = _text(64)(message["name"], f"{param}.name", limits)
    return found


def _content(value: Any, param: str, limits: Limits) -> str:
    """Text, or OpenAI's list of parts joined; parts that are not text are not supported."""
    if isinstance(value, list):
        parts: list[str] = []
        for part in cast("list[Any]", value):
            found = cast("Mapping[str, Any]", part) if isinstance(part, Mapping) else {}
            if found.get("type") != "text":
                raise UnsupportedParameter(f"{param}: only parts of type text are supported", param=param)
            parts.append(_long_text(found.get("text"), f"{param}.text", limits))
        return _long_text("".join(parts), param, limits)
    return _long_text(value, param, limits)


def _embedding_payload(payload: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    _known(payload, frozenset({"input", "dimensions"}), "payload.")
    param = "payload.input"
    value: Any = payload.get("input")
    given: Any = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{param} must be text or a list of at least one text", param=param)
    items = cast("list[Any]", given)
    if len(items) > limits.max_inputs:
        raise TooLarge(f"{param} has more than {limits.max_inputs} texts", param=param)
    for number, item in enumerate(items):
        if not _long_text(item, f"{param}[{number}]", limits):
            raise InvalidRequest(f"{param}[{number}] is empty", param=f"{param}[{number}]")
    if sum(len(item.encode()) for item in items) > limits.max_text_bytes:
        raise TooLarge(f"{param} has more than {limits.max_text_bytes} bytes", param=param)
    found: dict[str, Any] = {"input": items}
    if payload.get("dimensions") is not None:
        found["dimensions"] = _integer(1, 65_536)(payload["dimensions"], "payload.dimensions", limits)
    return found
