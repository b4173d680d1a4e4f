"""Bodies as agents send them at their second and third turn, captured from LiteLLM 1.x and langchain-openai."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.chat_bodies import ChatCompletionBody, chat_request
from penstock.gateway.openai.responses_bodies import ResponsesBody, responses_request
from penstock.schemas.errors import InvalidRequest, PenstockError, UnsupportedParameter

CALLER = Caller(tenant="acme")
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
