"""The table of requests that are refused: which error, and which field it names."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.schemas import refusals
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import (
    BadJson,
    InvalidRequest,
    PenstockError,
    TooLarge,
    UnsupportedParameter,
)
from penstock.schemas.payloads import OF_OTHER_SERVERS, only_remote
from penstock.schemas.plain import is_plain
from penstock.schemas.records import ContextLimits, InferenceRequest, OutputSpec, Requirements
from penstock.schemas.requests import Limits, content_hash, parse_request, parse_request_bytes, validate_request

NOW_MS = 1_760_000_000_000
CHAT: dict[str, Any] = {"task": "text_generation", "payload": {"messages": [{"role": "user", "content": "hi"}]}}


def chat(**payload: Any) -> dict[str, Any]:
    return {**CHAT, "payload": {**CHAT["payload"], **payload}}


def messages(*found: Any) -> dict[str, Any]:
    return chat(messages=list(found))


def embedding(**payload: Any) -> dict[str, Any]:
    return {"task": "embedding", "payload": payload}


BAD: list[tuple[dict[str, Any], type[PenstockError], str]] = [
    ({}, InvalidRequest, "task"),
    ({**CHAT, "task": "UNKNOWN"}, InvalidRequest, "task"),
    ({**CHAT, "task": ["embedding"]}, InvalidRequest, "task"),
    ({**CHAT, "task": "image_processing"}, InvalidRequest, "payload.image"),
    (
        {"task": "image_processing", "payload": {"image": {"url": "x"}, "operations": [{"op": "crop", "width": 1}]}},
        InvalidRequest,
        "payload.operations[0].height",
    ),
    (
        {"task": "image_processing", "payload": {"image": {"url": "x"}, "operations": [{"op": "crop", "width": "1"}]}},
        InvalidRequest,
        "payload.operations[0].width",
    ),
    (
        {
            "task": "image_processing",
            "payload": {"image": {"url": "x"}, "operations": [{"op": "composite", "image": {}}]},
        },
        InvalidRequest,
        "payload.operations[0].image",
    ),
    ({"task": "summarization", "payload": {"max_tokens": 5}}, InvalidRequest, "payload.text"),
    ({"task": "summarization", "payload": {"text": " "}}, InvalidRequest, "payload.text"),
    (
        {"task": "summarization", "payload": {"text": "x", "through_offset": 1}},
        InvalidRequest,
        "payload.through_offset",
    ),
    ({"task": "summarization", "payload": {"conversation_id": "a b"}}, InvalidRequest, "payload.conversation_id"),
    ({"task": "embedding"}, InvalidRequest, "payload"),
    ({**CHAT, "payload": []}, InvalidRequest, "payload"),
    ({**CHAT, "n": 2}, UnsupportedParameter, "n"),
    ({**CHAT, "\ud800": 2}, UnsupportedParameter, "\\ud800"),
    ({**CHAT, "x" * 500: 2}, UnsupportedParameter, "x" * 100),
    ({**CHAT, "request_id": "a b"}, InvalidRequest, "request_id"),
    ({**CHAT, "request_id": ""}, InvalidRequest, "request_id"),
    ({**CHAT, "request_id": 7}, InvalidRequest, "request_id"),
    ({**CHAT, "tenant": "Upper"}, InvalidRequest, "tenant"),
    ({**CHAT, "tenant": ""}, InvalidRequest, "tenant"),
    ({**CHAT, "priority": -1}, InvalidRequest, "priority"),
    ({**CHAT, "priority": 1001}, InvalidRequest, "priority"),
    ({**CHAT, "priority": True}, InvalidRequest, "priority"),
    ({**CHAT, "priority": 5.0}, InvalidRequest, "priority"),
    ({**CHAT, "model": ""}, InvalidRequest, "model"),
    ({**CHAT, "model": "\udfff"}, InvalidRequest, "model"),
    ({**CHAT, "pool": "gpu.1"}, InvalidRequest, "pool"),
    ({**CHAT, "pool": "größe"}, InvalidRequest, "pool"),
    ({**CHAT, "stream": 1}, InvalidRequest, "stream"),
    ({**CHAT, "ttl_ms": 0}, InvalidRequest, "ttl_ms"),
    ({**CHAT, "ttl_ms": 86_400_001}, InvalidRequest, "ttl_ms"),
    ({**CHAT, "deadline": "tomorrow"}, InvalidRequest, "deadline"),
    ({**CHAT, "deadline": "2025-10-09T09:00:00"}, InvalidRequest, "deadline"),
    ({**CHAT, "deadline": float("nan")}, InvalidRequest, "deadline"),
    ({**CHAT, "deadline": True}, InvalidRequest, "deadline"),
    ({**CHAT, "deadline": NOW_MS}, InvalidRequest, "deadline"),
    ({**CHAT, "execution_timeout_ms": 0}, InvalidRequest, "execution_timeout_ms"),
    ({**CHAT, "max_attempts": 11}, InvalidRequest, "max_attempts"),
    ({**CHAT, "max_attempts": -1}, InvalidRequest, "max_attempts"),
    ({**CHAT, "metadata": {"a": 1}}, InvalidRequest, "metadata"),
    ({**CHAT, "metadata": []}, InvalidRequest, "metadata"),
    ({**CHAT, "metadata": {str(n): "" for n in range(65)}}, TooLarge, "metadata"),
    ({**CHAT, "extra": {"a": "ä" * 8_193}}, TooLarge, "extra"),
    ({**CHAT, "requirements": {"vram_bytes": 2**63}}, InvalidRequest, "requirements.vram_bytes"),
    ({**CHAT, "requirements": {"gpus": 1}}, UnsupportedParameter, "requirements.gpus"),
    ({**CHAT, "callback_url": "ftp://x"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://[x"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://x:99999"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://ü.example"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://x\r\nevil: 1"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://user@x"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://x/" + "a" * 2_000}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://a..com/"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": "http://.x.com/"}, InvalidRequest, "callback_url"),
    ({**CHAT, "callback_url": f"http://{'a' * 64}.com/"}, InvalidRequest, "callback_url"),
    ({**CHAT, "output": {"store": "s"}}, UnsupportedParameter, "output"),
    ({**CHAT, "output": {"format": "png"}}, UnsupportedParameter, "output"),
    ({**CHAT, "conversation_id": "a.b"}, InvalidRequest, "conversation_id"),
    ({**CHAT, "conversation_id": True}, InvalidRequest, "conversation_id"),
    ({**embedding(input="a"), "conversation_id": "c"}, UnsupportedParameter, "conversation_id"),
    ({**CHAT, "context": {"last_turns": 2}}, InvalidRequest, "context"),
    ({**CHAT, "conversation_id": "c", "context": {"last_turns": -1}}, InvalidRequest, "context.last_turns"),
    ({**CHAT, "conversation_id": "c", "context": {"max_tokens": 2**31}}, InvalidRequest, "context.max_tokens"),
    ({**CHAT, "conversation_id": "c", "context": {"summary": "sometimes"}}, InvalidRequest, "context.summary"),
    ({"task": "summarization", "payload": {}}, InvalidRequest, "payload.text"),
    (
        {"task": "summarization", "conversation_id": "c", "payload": {"text": "x"}},
        InvalidRequest,
        "payload.text",
    ),
    (
        {"task": "summarization", "conversation_id": "c", "payload": {"conversation_id": "d"}},
        InvalidRequest,
        "payload.conversation_id",
    ),
    (
        {"task": "text_generation", "payload": {"prompt": "a"}, "conversation_id": "c"},
        InvalidRequest,
        "payload.messages",
    ),
    (chat(prompt="a"), InvalidRequest, "payload.messages"),
    ({**CHAT, "payload": {}}, InvalidRequest, "payload.messages"),
    (chat(max_tokens=0), InvalidRequest, "payload.max_tokens"),
    (chat(temperature=2.1), InvalidRequest, "payload.temperature"),
    (chat(temperature=float("nan")), InvalidRequest, "payload.temperature"),
    (chat(top_p=0), InvalidRequest, "payload.top_p"),
    (chat(top_k=0), InvalidRequest, "payload.top_k"),
    (chat(stop=["a"] * 17), InvalidRequest, "payload.stop"),
    (chat(stop=[""]), InvalidRequest, "payload.stop"),
    (chat(seed=2**63), InvalidRequest, "payload.seed"),
    (chat(tools=[{"type": "function"}]), InvalidRequest, "payload.tools[0].function"),
    (
        chat(tools=[{"function": {"name": "f", "parameters": []}}]),
        InvalidRequest,
        "payload.tools[0].function.parameters",
    ),
    (chat(tools=[{"function": {"name": "f"}}] * 129), TooLarge, "payload.tools"),
    (chat(tool_choice="some"), InvalidRequest, "payload.tool_choice"),
    (chat(tool_choice="{"), InvalidRequest, "payload.tool_choice"),
    (chat(tool_choice='{"a": NaN}'), InvalidRequest, "payload.tool_choice"),
    (
        chat(tools=[{"function": {"name": "f", "parameters": '{"maximum": 1e999}'}}]),
        InvalidRequest,
        "payload.tools[0].function.parameters",
    ),
    (chat(response_format={"type": "xml"}), InvalidRequest, "payload.response_format.type"),
    (chat(response_format={"type": "json_schema"}), InvalidRequest, "payload.response_format.json_schema"),
    (chat(n=1_001), InvalidRequest, "payload.n"),
    (chat(min_p=1.1), InvalidRequest, "payload.min_p"),
    (chat(presence_penalty=-2.1), InvalidRequest, "payload.presence_penalty"),
    (chat(frequency_penalty="1"), InvalidRequest, "payload.frequency_penalty"),
    (chat(top_logprobs=2), InvalidRequest, "payload.top_logprobs"),
    (chat(logit_bias={}), UnsupportedParameter, "payload.logit_bias"),
    (chat(prompt_token_ids=[1]), InvalidRequest, "payload.messages"),
    ({**CHAT, "payload": {"prompt_token_ids": [-1]}}, InvalidRequest, "payload.prompt_token_ids[0]"),
    ({**CHAT, "conversation_id": "c", "payload": {**CHAT["payload"], "n": 2}}, UnsupportedParameter, "payload.n"),
    ({**CHAT, "text_generation": {"prompt": "a"}}, InvalidRequest, "text_generation"),
    ({"task": "text_generation", "embedding": {"input": "a"}}, InvalidRequest, "embedding"),
    (messages(), InvalidRequest, "payload.messages"),
    (messages("hi"), InvalidRequest, "payload.messages[0]"),
    (messages({"role": "function", "content": "a"}), InvalidRequest, "payload.messages[0].role"),
    (messages({"role": "tool", "content": "a"}), InvalidRequest, "payload.messages[0].tool_call_id"),
    (
        messages({"role": "user", "content": "a", "tool_call_id": "c"}),
        InvalidRequest,
        "payload.messages[0].tool_call_id",
    ),
    (messages({"role": "system", "content": None}), InvalidRequest, "payload.messages[0].content"),
    (
        messages({"role": "user", "content": "a", "reasoning_content": "so"}),
        InvalidRequest,
        "payload.messages[0].reasoning_content",
    ),
    (
        messages({"role": "assistant", "content": "a", "reasoning_content": "ä" * 2_000_001}),
        TooLarge,
        "payload.messages[0].reasoning_content",
    ),
    (
        messages(
            {"role": "user", "content": "a", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}]}
        ),
        InvalidRequest,
        "payload.messages[0].tool_calls",
    ),
    (messages({"role": "user", "content": 1}), InvalidRequest, "payload.messages[0].content"),
    (messages({"role": "user"}), InvalidRequest, "payload.messages[0].content"),
    (
        messages({"role": "user", "content": [{"type": "image_url"}]}),
        InvalidRequest,
        "payload.messages[0].content[0].image_url",
    ),
    (messages({"role": "user", "content": "a", "name": "n" * 65}), InvalidRequest, "payload.messages[0].name"),
    (messages({"role": "user", "content": "a", "id": 1}), UnsupportedParameter, "payload.messages[0].id"),
    (messages(*[{"role": "user", "content": ""}] * 2_001), TooLarge, "payload.messages"),
    (messages(*[{"role": "user", "content": "ä" * 1_200_000}] * 2), TooLarge, "payload.messages"),
    (messages({"role": "user", "content": "a" * 4_000_001}), TooLarge, "payload.messages[0].content"),
    (embedding(), InvalidRequest, "payload.input"),
    (embedding(input=[]), InvalidRequest, "payload.input"),
    (embedding(input="a", input_token_ids=[[1]]), InvalidRequest, "payload.input"),
    (embedding(input_token_ids=[[]]), InvalidRequest, "payload.input[0]"),
    (embedding(input=["a", ""]), InvalidRequest, "payload.input[1]"),
    (embedding(input=["a", 1]), InvalidRequest, "payload.input[1]"),
    (embedding(input=["a"] * 2_049), TooLarge, "payload.input"),
    (embedding(input="a", dimensions=0), InvalidRequest, "payload.dimensions"),
    (embedding(input="a", encoding_format="float"), UnsupportedParameter, "payload.encoding_format"),
]


@pytest.mark.parametrize(
    ("body", "kind", "param"), BAD, ids=[f"{at}-{param[:30]}" for at, (_, _, param) in enumerate(BAD)]
)
def test_refused(body: dict[str, Any], kind: type[PenstockError], param: str) -> None:
    with pytest.raises(kind) as caught:
        parse_request(body, now_ms=NOW_MS)
    assert type(caught.value) is kind
    assert caught.value.param == param


@pytest.mark.parametrize("value", [b"", b"[]", b"nul", b"\xff{}", b'"a"', b'{"a":', b"[" * 100_000])
def test_not_json(value: bytes) -> None:
    with pytest.raises(BadJson):
        parse_request_bytes(value, now_ms=NOW_MS)


def test_the_record_is_bounded() -> None:
    with pytest.raises(TooLarge):
        parse_request_bytes(b" " * 101, now_ms=NOW_MS, limits=Limits(max_record_bytes=100))


def test_normal_forms() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": content}], stop="x", temperature=1, seed=None)
    request = parse_request({**body, "conversation_id": 42, "model": None}, now_ms=NOW_MS)
    assert request.conversation_id == "42"
    assert request.text_generation == {
        "temperature": 1.0,
        "stop": ["x"],
        "messages": [{"role": "system", "content": "ab"}],
    }
    assert (request.tenant, request.priority, request.created_at) == ("default", 5, NOW_MS)
    assert parse_request(embedding(input="a"), now_ms=NOW_MS).embedding == {"input": ["a"]}


def test_the_payload_may_stand_under_its_task_as_in_avro() -> None:
    """Issue 8, defect 24."""
    as_avro = parse_request({"task": "text_generation", "text_generation": CHAT["payload"]}, request_id="r", now_ms=1)
    assert as_avro == parse_request(CHAT, request_id="r", now_ms=1)
    nulls = dict.fromkeys(("embedding", "image_generation", "text_generation"))
    assert as_avro == parse_request({**CHAT, **nulls}, request_id="r", now_ms=1)


def test_tools_and_forms_of_answers_are_carried_as_avro_has_them() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    asked = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "4", "name": None},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": None}}]
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
    choice = {"type": "function", "function": {"name": "f"}}
    request = parse_request(chat(messages=asked, tools=tools, tool_choice=choice, response_format=form), now_ms=1)
    payload = request.payload
    assert payload["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{**call, "type": "function"}]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    assert payload["tools"] == [{"type": "function", "function": {"name": "f", "parameters": '{"type":"object"}'}}]
    assert payload["tool_choice"] == '{"type":"function","function":{"name":"f"}}'
    assert payload["response_format"]["json_schema"] == '{"name":"s","schema":{}}'
    assert list(only_remote("text_generation", payload, {})) == [
        "payload.tools",
        "payload.tool_choice",
        "payload.response_format",
        "payload.messages[1].tool_calls",
        "payload.messages[2].role",
    ]


def test_what_an_assistant_thought_goes_with_its_message_and_answers_may_be_without_text() -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    said = [thought, {**thought, "reasoning_content": None}, {"role": "assistant"}]
    told = {"role": "tool", "tool_call_id": "c1", "content": None}
    request = parse_request(chat(messages=[*said, told]), now_ms=1)
    empty = {"role": "assistant", "content": ""}
    bare = {"role": "assistant", "content": "4"}
    assert request.payload["messages"] == [thought, bare, empty, {**told, "content": ""}]
    decoded = default_codec().decode(default_codec().encode(request), InferenceRequest)
    assert decoded.payload["messages"][0]["reasoning_content"] == "2 and 2"


def test_values_that_change_nothing_are_for_every_model() -> None:
    neutral = {"n": 1, "logprobs": False, "tools": [], "tool_choice": "auto", "presence_penalty": 0, "min_p": 0.0}
    request = parse_request(chat(**neutral, response_format={"type": "text"}), now_ms=1)
    assert list(only_remote(request.task, request.payload, {"note": "x"})) == []
    assert list(only_remote(request.task, request.payload, {"logit_bias": "{}"})) == ["extra.logit_bias"]


def test_each_engine_of_ours_knows_fields_of_its_own() -> None:
    request = parse_request(chat(n=2, tools=[{"function": {"name": "f"}}], logprobs=True), now_ms=1)
    extra = {"logit_bias": "{}", "verbosity": '"low"'}
    assert list(only_remote(request.task, request.payload, extra, "text")) == ["extra.verbosity"]
    others = dict.fromkeys(sorted(OF_OTHER_SERVERS), "1")
    assert list(only_remote(request.task, {}, others, "text")) == []
    assert list(only_remote(request.task, {}, others)) == [f"extra.{name}" for name in others]
    assert list(only_remote(request.task, request.payload, {}, "embedding")) == [
        "payload.n",
        "payload.logprobs",
        "payload.tools",
    ]
    assert list(only_remote("embedding", {"input_token_ids": [[1]]}, {}, "embedding")) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (chat(max_tokens=0), "payload.max_tokens must be an integer of at least 1"),
        (chat(temperature=3), "payload.temperature must be from 0 to 2"),
        (chat(top_p=0), "payload.top_p must be above 0 to 1"),
        (chat(stop=5), "payload.stop must be text or a list"),
        ({**CHAT, "stream": "yes"}, "stream must be true or false"),
        ({**CHAT, "pool": "a.b"}, "pool must match [A-Za-z0-9_-]{1,63}"),
        ({**CHAT, "model": ""}, "model must be text of 1 to 200 characters"),
        ({**CHAT, "metadata": {"a": 1}}, "metadata must be an object of texts"),
        ({**CHAT, "payload": 5}, "payload must be an object"),
        (messages({"content": "a"}), "role is missing: it must be one of system, developer, user, assistant, tool"),
        (messages({"role": "x", "content": "a"}), "must be one of system, developer, user, assistant, tool"),
    ],
)
def test_a_refusal_says_what_the_field_must_be(body: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(body, now_ms=1)
    assert words in caught.value.message


def test_who_names_request_and_tenant() -> None:
    body = {**CHAT, "tenant": "acme"}
    assert parse_request(body, now_ms=1).tenant == "acme"
    assert parse_request(body, tenant="other", now_ms=1).tenant == "other"
    assert parse_request(body, request_id="made-up", now_ms=1).request_id == "made-up"
    assert parse_request({**body, "request_id": "own"}, request_id="made-up", now_ms=1).request_id == "own"
    assert parse_request(body, now_ms=1).request_id != parse_request(body, now_ms=1).request_id


@pytest.mark.parametrize(
    ("deadline", "ttl_ms"),
    [
        (NOW_MS // 1000 + 60, 60_000),
        (NOW_MS / 1000 + 0.5, 500),
        ("2025-10-09T08:53:21Z", 1_000),
        ("2025-10-09T10:53:21+02:00", 1_000),
        (0, 1),
        ("1970-01-01T00:00:00Z", 1),
    ],
)
def test_a_deadline_is_a_time_to_live(deadline: Any, ttl_ms: int) -> None:
    assert parse_request({**CHAT, "deadline": deadline}, now_ms=NOW_MS).ttl_ms == ttl_ms


REQUEST = InferenceRequest(
    request_id="r",
    task="text_generation",
    text_generation={"messages": [{"role": "user", "content": "a"}]},
    created_at=1,
)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"task": "UNKNOWN"}, "task"),
        ({"request_id": "a b"}, "request_id"),
        ({"tenant": "A"}, "tenant"),
        ({"text_generation": None}, "payload"),
        ({"embedding": {"input": ["a"]}}, "payload"),
        ({"text_generation": {"prompt": "a", "max_tokens": 0}}, "payload.max_tokens"),
        ({"priority": -1}, "priority"),
        ({"max_attempts": -1}, "max_attempts"),
        ({"requirements": Requirements(vram_bytes=-1)}, "requirements.vram_bytes"),
        ({"conversation_id": "c", "context": ContextLimits(last_turns=-1)}, "context.last_turns"),
        ({"context": ContextLimits(last_turns=1)}, "context"),
        ({"output": OutputSpec(store="s")}, "output"),
    ],
)
def test_avro_arrivals_are_held_to_the_same_rules(change: dict[str, Any], param: str) -> None:
    validate_request(REQUEST)
    with pytest.raises(InvalidRequest) as caught:
        validate_request(replace(REQUEST, **change))
    assert caught.value.param == param


def test_an_avro_arrival_has_the_normal_form_that_json_has() -> None:
    """Engines and templates know `system` alone; and a repeat in the other form is the same request."""
    tool = {"type": "function", "function": {"name": "f", "parameters": "{}"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given: dict[str, Any] = {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ],
        "tools": [tool],
    }
    from_json = parse_request(chat(**copy.deepcopy(given)), request_id="r", now_ms=1)
    codec = default_codec()
    from_avro = codec.decode(
        codec.encode(InferenceRequest(request_id="r", task="text_generation", text_generation=given, created_at=1)),
        InferenceRequest,
    )
    validate_request(from_avro)
    assert [message["role"] for message in from_avro.payload["messages"]] == ["system", "user", "assistant"]
    assert content_hash(from_avro) == content_hash(from_json)


def test_content_is_what_was_asked_for() -> None:
    assert content_hash(replace(REQUEST, request_id="other", created_at=2, tenant="b")) == content_hash(REQUEST)
    assert content_hash(replace(REQUEST, priority=1)) != content_hash(REQUEST)


@pytest.mark.parametrize(
    ("body", "digest"),
    [
        (
            {"task": "text_generation", "model": "m", "payload": {"prompt": "é"}, "metadata": {"a": "b"}, "ttl_ms": 5},
            "e015c6b7ccfcdad5e3dfc3369a2a7d6130b5c1372269786753f2f2e22bac4b53",
        ),
        (
            {
                "task": "text_generation",
                "conversation_id": "c",
                "context": {"max_tokens": 5},
                "stream": True,
                "payload": {"messages": [{"role": "user", "content": "x"}]},
            },
            "e7b7f098f4f212a18f5d406c02f4ebc154317cd4f1724f1340b888c732313bed",
        ),
        (
            {
                "task": "embedding",
                "payload": {"input": ["a", "b"]},
                "max_attempts": 2,
                "requirements": {"vram_bytes": 5},
            },
            "11aeb3ca1c021f1d1a5b964d542cec4486d161a1d7940a437be72db9a6f1345e",
        ),
    ],
)
def test_the_hash_of_a_content_stays_as_views_have_kept_it(body: dict[str, Any], digest: str) -> None:
    """Another hash would refuse the repeat of a request that an earlier release accepted."""
    assert content_hash(parse_request(body, request_id="r", now_ms=1)) == digest


def test_a_repeat_with_the_same_deadline_is_the_same_content() -> None:
    body = {"task": "text_generation", "payload": {"prompt": "x"}, "deadline": 1_700_000_600}
    first, later = (parse_request(body, request_id="r", now_ms=1_700_000_000_000 + wait) for wait in (0, 1_500))
    assert first.ttl_ms != later.ttl_ms
    assert content_hash(first) == content_hash(later)


MANY = 200_000
NAMES = {f"a{number}": 1 for number in range(MANY)}
CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (embedding(input=[1] * MANY), InvalidRequest, "payload.input[0]"),
        (embedding(input_token_ids=[[-1] * MANY]), InvalidRequest, "payload.input_token_ids[0][0]"),
        (embedding(input_token_ids=[1] * MANY), InvalidRequest, "payload.input_token_ids[0]"),
        (messages(*[1] * MANY), InvalidRequest, "payload.messages[0]"),
        (messages({"role": "user", "content": [1] * MANY}), InvalidRequest, "payload.messages[0].content[0]"),
        (messages({"role": "user", "content": "a", **NAMES}), UnsupportedParameter, "payload.messages[0].a0"),
        (
            messages({"role": "assistant", "tool_calls": [1] * MANY}),
            InvalidRequest,
            "payload.messages[0].tool_calls[0]",
        ),
        (
            messages({"role": "assistant", "tool_calls": [{**CALL, **NAMES}]}),
            UnsupportedParameter,
            "payload.messages[0].tool_calls[0].a0",
        ),
        (chat(messages=None, prompt_token_ids=["a"] * MANY), InvalidRequest, "payload.prompt_token_ids[0]"),
        (chat(stop=[1] * MANY), InvalidRequest, "payload.stop[0]"),
        (chat(tools=[1] * MANY), InvalidRequest, "payload.tools[0]"),
        (chat(**NAMES), UnsupportedParameter, "payload.a0"),
        ({**NAMES, **CHAT}, UnsupportedParameter, "a0"),
        ({**CHAT, "context": NAMES}, UnsupportedParameter, "context.a0"),
        ({**CHAT, "metadata": NAMES}, TooLarge, "metadata"),
        ({**CHAT, "extra": NAMES}, TooLarge, "extra"),
    ],
)
def test_of_very_much_that_is_wrong_only_the_first_is_told_apart(
    body: dict[str, Any], kind: type[PenstockError], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each problem that is told apart takes microseconds and kilobytes: a body has room for 500,000."""
    refusal, counts = refusals.refusal, list[int]()

    def counting(error: ValidationError, *rest: Any) -> PenstockError:
        counts.append(error.error_count())
        return refusal(error, *rest)

    monkeypatch.setattr(refusals, "refusal", counting)
    with pytest.raises(kind) as caught:
        parse_request(body, now_ms=NOW_MS)
    assert caught.value.param == param
    assert max(counts, default=0) <= 2 * refusals.MANY_NAMES


def test_a_conversation_that_went_through_avro_is_valid() -> None:
    """A record has every field of a message; those that nobody set must not be refused by name."""
    request = parse_request(messages({"role": "user", "content": "hi"}), request_id="r", now_ms=NOW_MS)
    read = default_codec().decode(default_codec().encode(request), InferenceRequest)
    assert is_plain(read, Limits()), "what most requests are is checked fast"
    validate_request(read)
    with_name = parse_request(messages({"role": "user", "content": "hi", "name": "n"}), request_id="r", now_ms=NOW_MS)
    read = default_codec().decode(default_codec().encode(with_name), InferenceRequest)
    validate_request(read)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation_id": "c", "payload": {}}, "payload.messages"),
        ({"conversation_id": "c", "payload": {"messages": []}}, "payload.messages"),
        ({"payload": {"messages": [{"role": "user", "content": "x"}]}}, "conversation_id"),
        ({"conversation_id": "c", "model": "m", "payload": {"messages": [{"role": "user", "content": "x"}]}}, "model"),
        (
            {"conversation_id": "c", "payload": {"messages": [{"role": "none", "content": "x"}]}},
            "payload.messages[0].role",
        ),
    ],
)
def test_items_of_a_conversation_are_messages_and_ask_no_model(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request({"task": "conversation_items", **fields}, now_ms=NOW_MS)
    assert caught.value.param == param
