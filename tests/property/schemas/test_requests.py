"""Requests from JSON: whatever is sent, only our errors are raised; what is accepted survives JSON and Avro."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from kit.records import outcome
from penstock.schemas.aliases import NAMES as NAMES_OF_OTHERS
from penstock.schemas.aliases import translate
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import PenstockError, to_error_record
from penstock.schemas.records import PAYLOAD_FIELDS, InferenceRequest, ResultEvent
from penstock.schemas.requests import (
    content_hash,
    parse_request,
    parse_request_bytes,
    request_to_json,
    validate_request,
)

NOW_MS = 1_760_000_000_000
CODEC = default_codec()

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800")
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)

TEXT = st.text(max_size=10)
SHORT = st.text(min_size=1, max_size=10)
NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,10}", fullmatch=True)
ROLES = st.sampled_from(("system", "developer", "user", "assistant"))
CONTENT = TEXT | st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=2)
MESSAGE = st.fixed_dictionaries({"role": ROLES, "content": CONTENT}, optional={"name": st.none() | SHORT})
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=3)
FUNCTION = st.fixed_dictionaries({"name": SHORT}, optional={"parameters": st.just({"a": [1]})})
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.none() | st.integers(1, 1_000_000),
    "temperature": st.floats(0, 2) | st.integers(0, 2),
    "top_p": st.floats(0.001, 1),
    "top_k": st.integers(1, 1_000_000),
    "stop": SHORT | st.lists(SHORT, max_size=3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.integers(-2, 2),
    "n": st.integers(1, 3),
    "logprobs": st.booleans(),
    "top_logprobs": st.none() | st.integers(0, 3),
    "tools": st.none() | st.lists(st.fixed_dictionaries({"function": FUNCTION}), max_size=2),
    "tool_choice": st.sampled_from(("none", "auto", "required")) | st.just({"type": "function"}),
    "response_format": st.sampled_from(({"type": "text"}, {"type": "json_schema", "json_schema": {"name": "x"}})),
}
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "request_id": st.from_regex(r"[A-Za-z0-9._:-]{1,10}", fullmatch=True),
    "tenant": st.from_regex(r"[a-z0-9-]{1,10}", fullmatch=True),
    "priority": st.integers(0, 1000),
    "model": SHORT,
    "pool": NAMES,
    "user_id": SHORT,
    "session_id": SHORT,
    "extra": st.dictionaries(TEXT, TEXT, max_size=2),
    "metadata": st.dictionaries(TEXT, TEXT, max_size=2),
    "stream": st.booleans(),
    "ttl_ms": st.integers(1, 86_400_000),
    "start_after": st.integers(NOW_MS // 1000 - 10, NOW_MS // 1000 + 1000) | st.just("2025-10-09T09:00:00Z"),
    "execution_timeout_ms": st.integers(1, 86_400_000),
    "max_attempts": st.integers(0, 10),
    "requirements": st.fixed_dictionaries(
        {}, optional={"vram_bytes": st.integers(0), "cpu_memory_bytes": st.none() | st.integers(0)}
    ),
    "deadline": st.integers(NOW_MS // 1000 - 10, NOW_MS // 1000 + 1000)
    | st.sampled_from(("2025-10-09T09:00:00Z", "2025-10-09T12:00:00+02:00", "2025-10-09T09:00:00")),
}
CONTEXT = st.fixed_dictionaries(
    {}, optional={"max_tokens": st.none() | st.integers(1), "last_turns": st.integers(0), "summary": st.just(False)}
)


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Requests that are good, or nearly so: a number may be larger than its field."""
    body = draw(st.fixed_dictionaries({}, optional=COMMON))
    match draw(st.sampled_from(("chat", "turn", "prompt", "embedding"))):
        case "embedding":
            payload = {"input": draw(SHORT | st.lists(SHORT, min_size=1, max_size=3))}
            if draw(st.booleans()):
                payload["dimensions"] = draw(st.integers(1, 65_536))
            return {**body, "task": "embedding", "payload": payload}
        case "prompt":
            payload = {**draw(st.fixed_dictionaries({}, optional=SAMPLING)), "prompt": draw(TEXT)}
        case shape:
            payload = {**draw(st.fixed_dictionaries({}, optional=SAMPLING)), "messages": draw(MESSAGES)}
            if shape == "turn":
                body["conversation_id"] = draw(NAMES | st.integers(0, 10**20))
                if draw(st.booleans()):
                    body["context"] = draw(CONTEXT)
    return {**body, "task": "text_generation", "payload": payload}


def writable(error: PenstockError) -> None:
    """An error can stand on a topic, whatever the caller's names were."""
    info = to_error_record(error)
    event = outcome(status="failed", error=info)
    assert CODEC.decode(CODEC.encode(event), ResultEvent).error == info
    assert len(info.message) < 2_000


def named(error: PenstockError) -> None:
    assert error.param
    assert error.code in ("invalid", "unsupported_parameter")


@settings(max_examples=examples(200), deadline=None)
@given(body=bodies())
def test_what_is_accepted_survives_json_and_avro(body: dict[str, Any]) -> None:
    try:
        request = parse_request(body, now_ms=NOW_MS)
    except PenstockError as error:
        writable(error)
        named(error)
        return
    validate_request(request)
    decoded = CODEC.decode(CODEC.encode(request), InferenceRequest)
    validate_request(decoded)
    assert content_hash(decoded) == content_hash(request)
    as_json = json.loads(json.dumps(request_to_json(request)))
    again = parse_request(as_json, now_ms=NOW_MS)
    assert again == request
    assert parse_request_bytes(json.dumps(as_json).encode(), now_ms=NOW_MS) == request
    later = parse_request({**as_json, "request_id": "other"}, now_ms=NOW_MS + 1)
    assert content_hash(later) == content_hash(request)
    longer = parse_request({**as_json, "metadata": {"another": "one"}}, now_ms=NOW_MS)
    assert content_hash(longer) != content_hash(request) or request.metadata == {"another": "one"}


FIELDS = [*COMMON, "task", "payload", "conversation_id", "context", "output", "callback_url", "other"]


@settings(max_examples=examples(300), deadline=None)
@given(body=bodies(), data=st.data())
def test_anything_in_any_field(body: dict[str, Any], data: st.DataObject) -> None:
    target = body
    if data.draw(st.booleans()):
        target = body["payload"]
    names = st.sampled_from([*FIELDS, *SAMPLING, "messages", "input"]) | st.text(max_size=5) | st.just("\ud800")
    target[data.draw(names)] = data.draw(JSON)
    try:
        request = parse_request(body, now_ms=NOW_MS)
    except PenstockError as error:
        writable(error)
    else:
        CODEC.encode(request)


@settings(max_examples=examples(200), deadline=None)
@given(body=JSON | st.fixed_dictionaries({"task": st.sampled_from(PAYLOAD_FIELDS), "payload": JSON}))
def test_arbitrary_json(body: Any) -> None:
    try:
        parse_request_bytes(json.dumps(body).encode(), now_ms=NOW_MS)
    except PenstockError as error:
        writable(error)


OTHER_NAMES = st.sampled_from([part for alias in NAMES_OF_OTHERS for part in alias.name.split(".")])
OBJECTS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.dictionaries(OTHER_NAMES | st.sampled_from(FIELDS), JSON, max_size=4),
    lambda inner: st.dictionaries(st.sampled_from(["payload", "parameters", "requirements", "operations"]), inner),
)


@settings(max_examples=examples(300), deadline=None)
@given(body=OBJECTS, task=st.sampled_from([None, *PAYLOAD_FIELDS]), kind=st.sampled_from([None, "text", "image"]))
def test_anything_under_the_names_of_other_services(body: dict[str, Any], task: str | None, kind: str | None) -> None:
    """No other error, and no change of the body."""
    body = {**body, "type": task}
    before = json.dumps(body)
    try:
        translate(body, kind)
        parse_request_bytes(before.encode(), now_ms=NOW_MS, topic_kind=kind)
    except PenstockError as error:
        writable(error)
    assert json.dumps(body) == before


@given(value=st.binary(max_size=40))
def test_arbitrary_bytes(value: bytes) -> None:
    try:
        parse_request_bytes(value, now_ms=NOW_MS)
    except PenstockError as error:
        writable(error)


def test_nesting_without_end() -> None:
    for value in (b"[" * 200_000, b'{"a":' * 100_000, b"1" * 10_000, b'{"priority":' + b"9" * 5_000 + b"}"):
        try:
            parse_request_bytes(value, now_ms=NOW_MS)
        except PenstockError as error:
            writable(error)
