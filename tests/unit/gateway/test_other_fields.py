"""Fields of other servers and unknown ones: passed on, without effect, refused, or ignored and named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kit.refusals import refused
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai import other_fields
from penstock.gateway.openai.chat_bodies import ChatCompletionBody, chat_request
from penstock.gateway.openai.endpoints import CHAT, COMPLETION, EMBEDDING, IMAGE, RESPONSE, Endpoint
from penstock.gateway.openai.nested_fields import IN_CHAT
from penstock.gateway.openai.other_fields import UnknownFields, ignored_header, set_aside_within
from penstock.gateway.openai.responses_bodies import ResponsesBody, responses_request
from penstock.schemas.errors import InvalidRequest, PenstockError, UnsupportedParameter
from penstock.schemas.records import InferenceRequest

CALLER = Caller(tenant="acme")
BODIES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    "completion": (COMPLETION, {"prompt": "a"}),
    "response": (RESPONSE, {"input": "a"}),
    "embedding": (EMBEDDING, {"input": "a"}),
    "image": (IMAGE, {"prompt": "a"}),
}
TEXT = ("chat", "completion", "response")


def asked(kind: str, fields: dict[str, Any], unknown: UnknownFields = "refuse") -> tuple[InferenceRequest, list[str]]:
    endpoint, body = BODIES[kind]
    read = endpoint.body.model_validate({**body, **fields})
    ignored = endpoint.set_aside(read, unknown)
    return endpoint.ask(read, CALLER, 1), ignored


@pytest.mark.parametrize("kind", TEXT)
def test_fields_of_other_servers_are_passed_to_every_model(kind: str) -> None:
    passed = {
        "repetition_penalty": 1.1,
        "min_tokens": 4,
        "ignore_eos": True,
        "truncate_prompt_tokens": 100,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request, ignored = asked(kind, {"top_k": 40, **passed})
    assert (request.payload["top_k"], ignored) == (40, [])
    assert request.extra == {name: json.dumps(value) for name, value in passed.items()}


HARMLESS_OF_TOOLS = {"async": False, "allowed_callers": ["direct"], "defer_loading": False}


@pytest.mark.parametrize("unknown", ["refuse", "ignore"])
@pytest.mark.parametrize(
    ("kinds", "fields"),
    [
        (TEXT, {"top_k": -1, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False}),
        (TEXT, {"top_k": 0, "chat_template_kwargs": {}, "truncate_prompt_tokens": None}),
        (TEXT, {"best_of": 1, "use_beam_search": False, "add_generation_prompt": True, "skip_special_tokens": True}),
        (TEXT, {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_obfuscation": True}}),
        (("response",), {"truncation": "auto"}),
        (("response",), {"reasoning": {"context": "auto", "mode": "standard"}}),
        (("response",), {"image": {"context_compression": "disabled"}}),
        (("response",), {"include": ["file_search_call.results", "reasoning.encrypted_content"]}),
        (("response",), {"tools": [{"type": "function", "name": "f", "parameters": {}, **HARMLESS_OF_TOOLS}]}),
        (("image",), {"quality": "standard"}),
        (tuple(BODIES), {"whim": None}),
    ],
)
def test_fields_without_effect_are_accepted(
    kinds: tuple[str, ...], fields: dict[str, Any], unknown: UnknownFields
) -> None:
    for kind in kinds:
        request, ignored = asked(kind, fields, unknown)
        assert (request.extra, request.payload.get("top_k"), ignored) == ({}, None, [])


PLAIN = [{"role": "user", "content": text} for text in "ab"]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"use_beam_search": True}, "use_beam_search"),
        ("chat", {"best_of": 2}, "best_of"),
        ("chat", {"guided_json": {}}, "guided_json"),
        ("completion", {"length_penalty": 2}, "length_penalty"),
        ("image", {"quality": "hd"}, "quality"),
        *((kind, {"whim": 1}, "whim") for kind in BODIES),
    ],
)
def test_fields_that_change_the_output_are_refused_or_ignored_and_named(
    kind: str, fields: dict[str, Any], param: str
) -> None:
    with refused(UnsupportedParameter, param=param):
        asked(kind, fields)
    plain, _ = asked(kind, {})
    request, ignored = asked(kind, fields, "ignore")
    assert ignored == [param]
    assert (request.payload, request.extra) == (plain.payload, plain.extra)


def test_fields_that_never_change_the_output_are_ignored_in_both_modes_and_named() -> None:
    fields = {"store": True, "prompt_cache_key": "k", "cache_salt": None, "whim": 1}
    assert asked("chat", {**fields, "whim": None})[1] == ["store", "prompt_cache_key"]
    assert asked("chat", fields, "ignore")[1] == ["store", "prompt_cache_key", "whim"]
    caching = {"max_tool_calls": 3, "prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": False}}
    assert asked("response", caching)[1] == ["max_tool_calls", "prompt_cache_options"]
    messages = [{**PLAIN[0], "whim": 1, "id": "x"}, {**PLAIN[1], "whim": 2}]
    request, ignored = asked("chat", {"messages": messages}, "ignore")
    assert (request.payload["messages"], ignored) == (PLAIN, ["messages[].whim"])


FORM = {"name": "n", "schema": {"type": "object", "whim": 1}}
IMAGE_URL = "https://example.com/a.png"
TOOL = {"name": "f", "parameters": {"type": "object", "whim": 1}}
CHAT_TOOL = {"tools": [{"type": "function", "function": TOOL}]}
CHAT_FORM = {"response_format": {"type": "json_schema", "json_schema": FORM}}
RESPONSE_TOOL = {"tools": [{"type": "function", **TOOL}]}
STREAM = {"stream": True, "stream_options": {}}


def said(**part: Any) -> list[dict[str, Any]]:
    """By the user, in one part."""
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    ("kind", "fields", "at"),
    [
        ("chat", {"messages": PLAIN}, "messages[1]"),
        ("chat", {"messages": said(type="text", text="a")}, "messages[0].content[0]"),
        (
            "chat",
            {"messages": said(type="image_url", image_url={"url": IMAGE_URL})},
            "messages[0].content[0].image_url",
        ),
        ("chat", CHAT_TOOL, "tools[0]"),
        ("chat", CHAT_TOOL, "tools[0].function"),
        ("chat", {**CHAT_TOOL, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ("chat", CHAT_FORM, "response_format"),
        ("chat", CHAT_FORM, "response_format.json_schema"),
        *((kind, STREAM, "stream_options") for kind in TEXT),
        ("response", {"input": PLAIN[:1]}, "input[0]"),
        ("response", {"input": said(type="input_text", text="a")}, "input[0].content[0]"),
        ("response", {"input": said(type="input_image", image_url=IMAGE_URL)}, "input[0].content[0]"),
        ("response", RESPONSE_TOOL, "tools[0]"),
        ("response", {**RESPONSE_TOOL, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ("response", {"text": {"format": {"type": "json_schema", **FORM}}}, "text.format"),
        *(("response", {name: {}}, name) for name in ("text", "reasoning")),
        ("response", {"conversation": {"id": "c"}}, "conversation"),
    ],
)
def test_unknown_names_within_fields_follow_the_rule_of_those_of_the_body(
    kind: str, fields: dict[str, Any], at: str
) -> None:
    """Refused with their place, or ignored and named; null counts as not given; a JSON Schema is not looked into."""

    def with_whim(value: Any) -> dict[str, Any]:
        changed = json.loads(json.dumps(fields))
        here: Any = changed
        for step in at.replace("[", ".[").split("."):
            here = here[int(step[1:-1]) if step.startswith("[") else step]
        here["whim"] = value
        return changed

    plain, _ = asked(kind, json.loads(json.dumps(fields)))
    with refused(UnsupportedParameter, param=f"{at}.whim", message=f"{at}.whim is not supported"):
        asked(kind, with_whim(1))
    cases: list[tuple[UnknownFields, Any, list[str]]] = [
        ("refuse", None, []),
        ("ignore", None, []),
        ("ignore", 1, [f"{at}.whim"]),
    ]
    for unknown, value, named in cases:
        request, ignored = asked(kind, with_whim(value), unknown)
        assert ignored == [re.sub(r"\d+", "", name) for name in named]
        assert (request.payload, request.extra) == (plain.payload, plain.extra)


def test_what_was_said_before_is_not_judged() -> None:
    part = {"type": "text", "text": "b", "whim": 1}
    call = {"id": "1", "type": "function", "whim": 1, "function": {"name": "f", "arguments": "{}", "whim": 1}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [part], "tool_calls": [call]},
        {"role": "tool", "content": [part], "tool_call_id": "1"},
    ]
    request, ignored = asked("chat", {"messages": messages})
    kept = [(one["role"], one["content"]) for one in request.payload["messages"]]
    assert (kept, ignored) == ([("user", "a"), ("assistant", "b"), ("tool", "b")], [])
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {}}], "id": "m"},
        {"type": "reasoning", "summary": [], "whim": 1},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "whim": 1}], "whim": 1},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "whim": 1},
        {"type": "function_call_output", "call_id": "1", "output": "b", "whim": 1},
    ]
    request, ignored = asked("response", {"input": items})
    roles = [one["role"] for one in request.payload["messages"]]
    assert (roles, ignored) == (["user", "assistant", "assistant", "tool"], [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"mode": "explicit", "prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"include": ["message.input_image.image_url"]}, "include"),
        ({"image": {"context_compression": "enabled"}}, "image"),
        ({"service_tier": "ultrafast"}, "service_tier"),
    ],
)
def test_fields_of_responses_that_would_change_something_are_refused(fields: dict[str, Any], param: str) -> None:
    with refused(UnsupportedParameter, param=param):
        asked("response", fields)


@pytest.mark.parametrize(
    ("fields", "param"), [({"top_k": -2}, "top_k"), ({"penstock": {"top_k": 0}}, "penstock.top_k")]
)
def test_known_fields_must_have_their_types_in_both_modes(fields: dict[str, Any], param: str) -> None:
    for unknown in ("refuse", "ignore"):
        with refused(InvalidRequest, param=param):
            asked("chat", fields, unknown)


def test_a_header_names_plain_names_alone() -> None:
    names = ["store", "messages[].whim", "a\r\nset-cookie: x", "ä", "", "x" * 65]
    assert ignored_header(names) == {"penstock-ignored-fields": "store, messages[].whim"}
    assert ignored_header([]) == {}
    assert ignored_header(["\n"]) == {}
    assert len(ignored_header([f"f{number}" for number in range(2_000)])["penstock-ignored-fields"]) < 300


def test_many_empty_names_and_lists_in_lists_are_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(other_fields, "place_of", lambda path: made.append(path) or "place")
    content: Any = [{"type": "text", "text": "a", **{str(number): None for number in range(1_000)}}]
    assert set_aside_within([{"role": "user", "content": content}], IN_CHAT["messages"], "messages", "refuse") == []
    deep: Any = [{"type": "text", "text": "a", "whim": 1}]
    for _ in range(200):
        deep = [deep]
    assert set_aside_within([{"role": "user", "content": deep}], IN_CHAT["messages"], "messages", "refuse") == []
    assert made == []


# -- bodies as agents send them at their second and third turn, captured from LiteLLM 1.x and langchain-openai


USER = {"role": "user", "content": "Weather?"}
FUNCTION = {"name": "weather", "arguments": '{"city":"Paris"}'}
CALL = {"id": "call_0", "type": "function", "function": FUNCTION}
TOLD = {"role": "tool", "tool_call_id": "call_0", "content": "sunny"}


def chat(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    body = ChatCompletionBody.model_validate({"messages": list(messages), **more})
    return chat_request(body, CALLER, 1).payload["messages"]


def responses(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return responses_request(ResponsesBody.model_validate({"input": list(items)}), CALLER, 1).payload["messages"]


ECHOED_CALLS = [
    ({"index": 0, "provider_specific_fields": None}, FUNCTION),
    ({"function": {**FUNCTION, "parsed_arguments": {"city": "Paris"}}}, FUNCTION),
    ({"function": {"name": "f", "arguments": {"a": 1}}}, {"name": "f", "arguments": '{"a": 1}'}),
    ({"function": {"name": "f", "arguments": [1]}}, {"name": "f", "arguments": "[1]"}),
    ({"function": {"name": "f", "arguments": None}}, {"name": "f", "arguments": ""}),
    ({"function": {"name": "f"}}, {"name": "f", "arguments": ""}),
]
THOUGHT_PART = {"type": "thinking", "thinking": "so"}
TEXT_PART = {"type": "text", "text": "a", "cache_control": {}}


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"content": "a", "provider_specific_fields": {"refusal": None}, "function_call": None, "id": "x"}, {}),
        ({"content": "a", "cache_control": {"type": "ephemeral"}, "annotations": [{"type": "url_citation"}]}, {}),
        ({"content": "a", "thinking_blocks": [{"type": "thinking"}], "parsed": {"a": 1}, "type": "message"}, {}),
        ({"content": None, "refusal": "a"}, {}),
        ({"content": "a", "refusal": "b"}, {}),
        ({"content": [{"type": "refusal", "refusal": "a"}]}, {}),
        ({"content": "a", "reasoning": "so"}, {"reasoning_content": "so"}),
        ({"content": "a", "reasoning": "so", "reasoning_content": "this"}, {"reasoning_content": "this"}),
        ({"content": "a", "reasoning": {"effort": "low"}}, {}),
        ({"content": [THOUGHT_PART, TEXT_PART]}, {"reasoning_content": "so"}),
    ],
)
def test_what_clients_echo_is_accepted(message: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert chat(USER, {"role": "assistant", **message})[1] == {"role": "assistant", "content": "a", **wanted}
    for more, function in ECHOED_CALLS:
        echoed = chat(USER, {"role": "assistant", **message, "tool_calls": [{**CALL, **more}]})[1]
        assert echoed["tool_calls"] == [{**CALL, "function": function}]


def test_calls_of_functions_as_they_were_before_tools() -> None:
    told = {"role": "function", "name": "weather", "content": "sunny"}
    found = chat(USER, {"role": "assistant", "content": None, "function_call": FUNCTION}, told)
    assert found[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call_1"}]},
        {"role": "tool", "name": "weather", "content": "sunny", "tool_call_id": "call_1"},
    ]


def test_users_and_tools_echo_too_and_an_empty_answer_of_a_tool_is_one() -> None:
    found = chat({**USER, "id": "m1", "reasoning_content": "no"}, {**TOLD, "content": None, "status": "success"})
    assert found == [USER, {**TOLD, "content": ""}]
    tool = {"type": "function", "function": {"name": "f", "cache_control": {}}, "cache_control": {"type": "ephemeral"}}
    body = ChatCompletionBody.model_validate({"messages": [USER], "tools": [tool]})
    assert chat_request(body, CALLER, 1).payload["tools"] == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([{**USER, "whim": 1}], UnsupportedParameter),
        ([{"role": "assistant", "content": "a", "audio": {"id": "x"}}], UnsupportedParameter),
        ([{"role": "function", "name": "f", "content": "a"}], InvalidRequest),
        ([{"role": "assistant", "content": "a", "tool_calls": [5]}], InvalidRequest),
        ([{"role": "assistant", "content": "a", "function_call": 5}], InvalidRequest),
        ([{"role": "user", "content": None}], InvalidRequest),
    ],
)
def test_what_nobody_is_known_to_echo_is_refused(messages: list[dict[str, Any]], kind: type[PenstockError]) -> None:
    with pytest.raises(kind):
        chat(*messages)


def test_the_third_turn_of_langchain_and_litellm_on_responses() -> None:
    thought = {"id": "rs_1", "summary": [{"text": "I think.", "type": "summary_text"}], "type": "reasoning"}
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_0", **FUNCTION, "status": "completed"}
    more = {"async_": None, "caller": None, "namespace": None}
    content = [{"annotations": [], "text": "It is sunny.", "type": "output_text", "logprobs": []}]
    said = {"id": "msg_1", "role": "assistant", "status": "completed", "type": "message", "phase": None}
    told = {"type": "function_call_output", "call_id": "call_0", "output": "sunny"}
    raw = {**thought, "content": [{"type": "reasoning_text", "text": "Well."}], "encrypted_content": "x"}
    assert responses(USER, thought, {**call, **more}, told, raw, {**said, "content": content}, thought, USER) == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I think."},
        TOLD,
        {"role": "assistant", "content": "It is sunny.", "reasoning_content": "Well."},
        USER,
    ]


def test_thoughts_between_two_calls_part_them() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "And."}]}
    call = {"type": "function_call", "call_id": "call_0", **FUNCTION}
    together, apart = responses(USER, call, call)[1:], responses(USER, call, thought, call)[1:]
    assert [len(message["tool_calls"]) for message in together] == [2]
    assert [message.get("reasoning_content") for message in apart] == [None, "And."]
