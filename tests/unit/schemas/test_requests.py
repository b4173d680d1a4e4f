"""The table of requests that are refused: which error, and which field it names."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from kit.refusals import refused
from penstock.schemas import refusals
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BadJson, InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.payloads import OF_OTHER_SERVERS, only_remote
from penstock.schemas.plain import is_plain
from penstock.schemas.records import ContextLimits, InferenceRequest, OutputSpec, Requirements
from penstock.schemas.requests import LIMITS, content_hash, parse_request, parse_request_bytes, validate_request

NOW_MS = 1_760_000_000_000
CHAT: dict[str, Any] = {"task": "text_generation", "payload": {"messages": [{"role": "user", "content": "hi"}]}}


def chat(**payload: Any) -> dict[str, Any]:
    return {**CHAT, "payload": {**CHAT["payload"], **payload}}


def messages(*found: Any) -> dict[str, Any]:
    return chat(messages=list(found))


def said(role: str = "user", **fields: Any) -> dict[str, Any]:
    return messages({"role": role, **fields})


def form(kind: str, **fields: Any) -> dict[str, Any]:
    return chat(response_format={"type": kind, **fields})


def edit(operation: dict[str, Any]) -> dict[str, Any]:
    return {"task": "image_processing", "payload": {"image": {"url": "x"}, "operations": [operation]}}


def summary(**payload: Any) -> dict[str, Any]:
    return {"task": "summarization", "payload": payload}


def embedding(**payload: Any) -> dict[str, Any]:
    return {"task": "embedding", "payload": payload}


WRONG_FIELDS: dict[str, list[Any]] = {
    "task": ["UNKNOWN", ["embedding"]],
    "payload": [[]],
    "request_id": ["a b", "", 7],
    "tenant": ["Upper", ""],
    "priority": [-1, 1001, True, 5.0],
    "model": ["", "\udfff"],
    "pool": ["gpu.1", "größe"],
    "stream": [1],
    "ttl_ms": [0, 86_400_001],
    "deadline": ["tomorrow", float("nan"), True, "", 9_999_999_999],
    "execution_timeout_ms": [0],
    "max_attempts": [11, -1],
    "metadata": [{"a": 1}, []],
    "callback_url": [
        "ftp://x",
        "http://",
        "http://[x",
        "http://x:99999",
        "http://ü.example",
        "http://x\r\nevil: 1",
        "http://user@x",
        "http://x/" + "a" * 2_000,
        "http://a..com/",
        "http://.x.com/",
        f"http://{'a' * 64}.com/",
    ],
    "conversation_id": ["a.b", True],
    "context": [{"last_turns": 2}],
    "text_generation": [{"prompt": "a"}],
}
"""Values that each field of a chat request refuses."""
WRONG_PAYLOADS: dict[str, list[Any]] = {
    "max_tokens": [0],
    "temperature": [2.1, float("nan")],
    "top_p": [0],
    "top_k": [0],
    "stop": [["a"] * 17, [""]],
    "seed": [2**63],
    "tool_choice": ["some", "{"],
    "n": [1_001],
    "min_p": [1.1],
    "presence_penalty": [-2.1],
    "frequency_penalty": ["1"],
    "top_logprobs": [2],
}
"""The same of fields of its payload."""
REFUSED: dict[type[PenstockError], list[tuple[dict[str, Any], str]]] = {
    InvalidRequest: [
        ({}, "task"),
        ({**CHAT, "task": "image_processing"}, "payload.image"),
        (edit({"op": "crop", "width": 1}), "payload.operations[0].height"),
        (edit({"op": "crop", "width": "1"}), "payload.operations[0].width"),
        (edit({"op": "composite", "image": {}}), "payload.operations[0].image"),
        (summary(max_tokens=5), "payload.text"),
        (summary(text=" "), "payload.text"),
        (summary(text="x", through_offset=1), "payload.through_offset"),
        (summary(conversation_id="a b"), "payload.conversation_id"),
        ({"task": "embedding"}, "payload"),
        ({**CHAT, "requirements": {"vram_bytes": 2**63}}, "requirements.vram_bytes"),
        ({**CHAT, "conversation_id": "c", "context": {"last_turns": -1}}, "context.last_turns"),
        ({**CHAT, "conversation_id": "c", "context": {"max_tokens": 2**31}}, "context.max_tokens"),
        ({**CHAT, "conversation_id": "c", "context": {"summary": "sometimes"}}, "context.summary"),
        (summary(), "payload.text"),
        ({**summary(text="x"), "conversation_id": "c"}, "payload.text"),
        ({**summary(conversation_id="d"), "conversation_id": "c"}, "payload.conversation_id"),
        ({"task": "text_generation", "payload": {"prompt": "a"}, "conversation_id": "c"}, "payload.messages"),
        (chat(prompt="a"), "payload.messages"),
        ({**CHAT, "payload": {}}, "payload.messages"),
        (chat(tools=[{"type": "function"}]), "payload.tools[0].function"),
        (chat(tools=[{"function": {"name": "f", "parameters": []}}]), "payload.tools[0].function.parameters"),
        (
            chat(tools=[{"function": {"name": "f", "parameters": '{"maximum": 1e999}'}}]),
            "payload.tools[0].function.parameters.maximum",
        ),
        (
            chat(tools=[{"function": {"name": "f", "parameters": '{"enum": ["\\ud83d"]}'}}]),
            "payload.tools[0].function.parameters.enum[0]",
        ),
        (chat(tools=[{"function": {"name": "f", "parameters": "[" * 10**5}}]), "payload.tools[0].function.parameters"),
        (chat(tool_choice='{"a": NaN}'), "payload.tool_choice.a"),
        (
            chat(response_format={"type": "json_schema", "json_schema": {"schema": {"const": "\udfff"}}}),
            "payload.response_format.json_schema.schema.const",
        ),
        (form("xml"), "payload.response_format.type"),
        (form("json_schema"), "payload.response_format.json_schema"),
        (form("text", schema={}), "payload.response_format.schema"),
        (form("json_object", schema=[]), "payload.response_format.schema"),
        (form("json_object", schema="["), "payload.response_format.schema"),
        (form("json_schema", json_schema={"name": "s"}, schema={}), "payload.response_format.schema"),
        (form("json_object", json_schema={"name": "s"}), "payload.response_format.json_schema"),
        (chat(prompt_token_ids=[1]), "payload.messages"),
        ({**CHAT, "payload": {"prompt_token_ids": [-1]}}, "payload.prompt_token_ids[0]"),
        ({"task": "text_generation", "embedding": {"input": "a"}}, "embedding"),
        (messages(), "payload.messages"),
        (messages("hi"), "payload.messages[0]"),
        (said("function", content="a"), "payload.messages[0].role"),
        (said("tool", content="a"), "payload.messages[0].tool_call_id"),
        (said(content="a", tool_call_id="c"), "payload.messages[0].tool_call_id"),
        (said("system", content=None), "payload.messages[0].content"),
        (said(content="a", reasoning_content="so"), "payload.messages[0].reasoning_content"),
        (
            said(content="a", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": ""}}]),
            "payload.messages[0].tool_calls",
        ),
        (said(content=1), "payload.messages[0].content"),
        (said(), "payload.messages[0].content"),
        (said(content=[{"type": "image_url"}]), "payload.messages[0].content[0].image_url"),
        (said(content="a", name="n" * 65), "payload.messages[0].name"),
        (embedding(), "payload.input"),
        (embedding(input=[]), "payload.input"),
        (embedding(input="a", input_token_ids=[[1]]), "payload.input"),
        (embedding(input_token_ids=[[]]), "payload.input[0]"),
        (embedding(input=["a", ""]), "payload.input[1]"),
        (embedding(input=["a", 1]), "payload.input[1]"),
        (embedding(input="a", dimensions=0), "payload.dimensions"),
    ],
    UnsupportedParameter: [
        ({**CHAT, "n": 2}, "n"),
        ({**CHAT, "\ud800": 2}, "\\ud800"),
        ({**CHAT, "x" * 500: 2}, "x" * 100),
        ({**CHAT, "requirements": {"gpus": 1}}, "requirements.gpus"),
        ({**CHAT, "output": {"store": "s"}}, "output"),
        ({**CHAT, "output": {"format": "png"}}, "output"),
        ({**embedding(input="a"), "conversation_id": "c"}, "conversation_id"),
        (chat(logit_bias={}), "payload.logit_bias"),
        ({**CHAT, "conversation_id": "c", "payload": {**CHAT["payload"], "n": 2}}, "payload.n"),
        (said(content="a", id=1), "payload.messages[0].id"),
        (embedding(input="a", encoding_format="float"), "payload.encoding_format"),
    ],
    TooLarge: [
        ({**CHAT, "metadata": {str(n): "" for n in range(65)}}, "metadata"),
        ({**CHAT, "extra": {"a": "ä" * 8_193}}, "extra"),
        (chat(tools=[{"function": {"name": "f"}}] * 129), "payload.tools"),
        (said("assistant", content="a", reasoning_content="ä" * 2_000_001), "payload.messages[0].reasoning_content"),
        (messages(*[{"role": "user", "content": ""}] * 2_001), "payload.messages"),
        (messages(*[{"role": "user", "content": "ä" * 1_200_000}] * 2), "payload.messages"),
        (said(content="a" * 4_000_001), "payload.messages[0].content"),
        (embedding(input=["a"] * 2_049), "payload.input"),
    ],
}


BAD = [
    *(({**CHAT, name: value}, InvalidRequest, name) for name, values in WRONG_FIELDS.items() for value in values),
    *(
        (chat(**{name: one}), InvalidRequest, f"payload.{name}")
        for name, found in WRONG_PAYLOADS.items()
        for one in found
    ),
    *((body, kind, param) for kind, rows in REFUSED.items() for body, param in rows),
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


def test_an_error_is_not_its_own_cause() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request_bytes(b'{"payload": {"prompt": "\\ud800"}}', now_ms=NOW_MS)
    assert caught.value.param
    assert caught.value.__cause__ is not caught.value


def test_the_record_is_bounded() -> None:
    with pytest.raises(TooLarge):
        parse_request_bytes(b" " * (LIMITS.max_record_bytes + 1), now_ms=NOW_MS)


def test_normal_forms() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "developer", "content": content}], stop="x", temperature=1, seed=None)
    request = parse_request({**body, "conversation_id": 42, "model": None}, now_ms=NOW_MS)
    assert request.conversation_id == "42"
    normal = {"temperature": 1.0, "stop": ["x"], "messages": [{"role": "system", "content": "ab"}]}
    assert request.text_generation == normal
    assert (request.tenant, request.priority, request.created_at) == ("default", 5, NOW_MS)
    assert parse_request(embedding(input="a"), now_ms=NOW_MS).embedding == {"input": ["a"]}


def test_the_payload_may_stand_under_its_task_as_in_avro() -> None:
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


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@pytest.mark.parametrize("schema", [{"type": "object"}, '{"type":"object"}'])
def test_a_schema_beside_the_type_is_read_as_openais_form(kind: str, schema: Any) -> None:
    request = parse_request(chat(response_format={"type": kind, "schema": schema, "json_schema": None}), now_ms=1)
    text = '{"name":"response","schema":{"type":"object"}}'
    assert request.payload["response_format"] == {"type": "json_schema", "json_schema": text}


def test_any_json_object_is_asked_for_without_a_schema() -> None:
    request = parse_request(form("json_object", schema=None), now_ms=1)
    assert request.payload["response_format"] == {"type": "json_object"}


def test_what_an_assistant_thought_goes_with_its_message_and_answers_may_be_without_text() -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    said = [thought, {**thought, "reasoning_content": None}, {"role": "assistant"}]
    told = {"role": "tool", "tool_call_id": "c1", "content": None}
    request = parse_request(chat(messages=[*said, told]), now_ms=1)
    empty = {"role": "assistant", "content": ""}
    bare = {"role": "assistant", "content": "4"}
    assert request.payload["messages"] == [thought, bare, empty, {**told, "content": ""}]
    assert through_avro(request).payload["messages"][0]["reasoning_content"] == "2 and 2"


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
    unknown = ["payload.n", "payload.logprobs", "payload.tools"]
    assert list(only_remote(request.task, request.payload, {}, "embedding")) == unknown
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
        (said("x", content="a"), "must be one of system, developer, user, assistant, tool"),
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


def arriving(**payload: Any) -> InferenceRequest:
    """A request as Avro brings it."""
    return InferenceRequest(request_id="r", task="text_generation", text_generation=payload, created_at=1)


def through_avro(request: InferenceRequest) -> InferenceRequest:
    return default_codec().decode(default_codec().encode(request), InferenceRequest)


REQUEST = arriving(messages=[{"role": "user", "content": "a"}])


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
    with refused(InvalidRequest, param=param):
        validate_request(replace(REQUEST, **change))


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
    from_avro = through_avro(arriving(**given))
    validate_request(from_avro)
    assert [message["role"] for message in from_avro.payload["messages"]] == ["system", "user", "assistant"]
    assert content_hash(from_avro) == content_hash(from_json)


def test_content_is_what_was_asked_for() -> None:
    assert content_hash(replace(REQUEST, request_id="other", created_at=2, tenant="b")) == content_hash(REQUEST)
    assert content_hash(replace(REQUEST, priority=1)) != content_hash(REQUEST)


PROMPT: dict[str, Any] = {"task": "text_generation", "payload": {"prompt": "é"}}
TURN: dict[str, Any] = {"conversation_id": "c", "context": {"max_tokens": 5}, "stream": True}
VECTORS: dict[str, Any] = {**embedding(input=["a", "b"]), "max_attempts": 2, "requirements": {"vram_bytes": 5}}
DIGESTS: dict[str, dict[str, Any]] = {
    "e015c6b7ccfcdad5e3dfc3369a2a7d6130b5c1372269786753f2f2e22bac4b53": {
        **PROMPT, "model": "m", "metadata": {"a": "b"}, "ttl_ms": 5
    },
    "e7b7f098f4f212a18f5d406c02f4ebc154317cd4f1724f1340b888c732313bed": {**said(content="x"), **TURN},
    "11aeb3ca1c021f1d1a5b964d542cec4486d161a1d7940a437be72db9a6f1345e": VECTORS,
}  # fmt: skip


@pytest.mark.parametrize(("digest", "body"), DIGESTS.items())
def test_the_hash_of_a_content_stays_as_views_have_kept_it(digest: str, body: dict[str, Any]) -> None:
    """Another hash would refuse the repeat of a request that an earlier release accepted."""
    assert content_hash(parse_request(body, request_id="r", now_ms=1)) == digest


def test_a_repeat_with_the_same_deadline_is_the_same_content() -> None:
    body = {**PROMPT, "deadline": 1_700_000_600}
    first, later = (parse_request(body, request_id="r", now_ms=1_700_000_000_000 + wait) for wait in (0, 1_500))
    assert first.ttl_ms != later.ttl_ms
    assert content_hash(first) == content_hash(later)


MANY = 200_000
NAMES = {f"a{number}": 1 for number in range(MANY)}
ODD_CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}, **NAMES}


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        (embedding(input=[1] * MANY), InvalidRequest, "payload.input[0]"),
        (embedding(input_token_ids=[[-1] * MANY]), InvalidRequest, "payload.input_token_ids[0][0]"),
        (embedding(input_token_ids=[1] * MANY), InvalidRequest, "payload.input_token_ids[0]"),
        (messages(*[1] * MANY), InvalidRequest, "payload.messages[0]"),
        (said(content=[1] * MANY), InvalidRequest, "payload.messages[0].content[0]"),
        (said(content="a", **NAMES), UnsupportedParameter, "payload.messages[0].a0"),
        (said("assistant", tool_calls=[1] * MANY), InvalidRequest, "payload.messages[0].tool_calls[0]"),
        (said("assistant", tool_calls=[ODD_CALL]), UnsupportedParameter, "payload.messages[0].tool_calls[0].a0"),
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
    with refused(kind, param=param):
        parse_request(body, now_ms=NOW_MS)
    assert max(counts, default=0) <= 2 * refusals.MANY_NAMES


def test_a_conversation_that_went_through_avro_is_valid() -> None:
    """A record has every field of a message; those that nobody set must not be refused by name."""
    read = through_avro(parse_request(CHAT, request_id="r", now_ms=NOW_MS))
    assert is_plain(read), "what most requests are is checked fast"
    validate_request(read)
    validate_request(through_avro(parse_request(said(content="hi", name="n"), request_id="r", now_ms=NOW_MS)))


@pytest.mark.parametrize(
    ("body", "fields", "param"),
    [
        ({"payload": {}}, {"conversation_id": "c"}, "payload.messages"),
        (messages(), {"conversation_id": "c"}, "payload.messages"),
        (CHAT, {}, "conversation_id"),
        (CHAT, {"conversation_id": "c", "model": "m"}, "model"),
        (said("none", content="x"), {"conversation_id": "c"}, "payload.messages[0].role"),
    ],
)
def test_items_of_a_conversation_are_messages_and_ask_no_model(body: Any, fields: Any, param: str) -> None:
    with refused(InvalidRequest, param=param):
        parse_request({**body, **fields, "task": "conversation_items"}, now_ms=NOW_MS)
