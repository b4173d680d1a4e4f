"""The stock OpenAI client against /v1/responses: text, items, tools, streams, refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from support import wait_until

if TYPE_CHECKING:
    from .conftest import Server

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=20)


def test_text_and_instructions(client: openai.OpenAI, server: Server) -> None:
    answer = client.responses.create(
        model="smol",
        instructions="Be brief.",
        input="say Paris 🗼",
        max_output_tokens=20,
        temperature=0.5,
        metadata={"trace": "t"},
        user="u1",
        service_tier="flex",
        store=False,
        extra_body={"penstock": {"ttl_ms": 5000}},
    )
    request = server.service.requests[-1]
    assert (answer.output_text, answer.status, answer.object) == ("Paris 🗼", "completed", "response")
    assert answer.id == f"resp_{request.request_id}"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 5, 12)
    assert [message["role"] for message in request.payload["messages"]] == ["system", "user"]
    assert (request.payload["max_tokens"], request.payload["temperature"]) == (20, 0.5)
    assert (request.metadata, request.user_id, request.priority, request.ttl_ms) == ({"trace": "t"}, "u1", 8, 5000)


def test_answers_are_sent_back_as_items(client: openai.OpenAI, server: Server) -> None:
    first = client.responses.create(model="smol", input=[{"role": "user", "content": "say hi"}])
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "say hi"}]},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "say more"},
    ]
    assert client.responses.create(model="smol", input=items, conversation="c1").output_text == "more"
    request = server.service.requests[-1]
    assert [message["content"] for message in request.payload["messages"]] == ["say hi", "hi", "say more"]
    assert request.conversation_id == "c1"


def test_a_stream_is_the_same_text(client: openai.OpenAI) -> None:
    with client.responses.stream(model="smol", input="say The capital of France") as stream:
        events = list(stream)
        answer = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text
    assert answer.output_text == "The capital of France"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    raw = [event.type for event in client.responses.create(model="smol", input="quiet x", stream=True)]
    assert raw.count("response.output_text.delta") == 1
    assert client.responses.create(model="smol", input="say ").output_text == ""


def test_tools(client: openai.OpenAI, server: Server) -> None:
    answer = client.responses.create(model="far", input="tools", tools=TOOLS, tool_choice="required")
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.call_id, call.name, json.loads(call.arguments)) == ("call_1", "weather", {"city": "Paris"})
    function = server.service.requests[-1].payload["tools"][0]["function"]
    assert function == {"name": "weather", "parameters": '{"type":"object"}', "strict": True}
    items: Any = [
        {"role": "user", "content": "tools"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "say 20 degrees"},
    ]
    assert client.responses.create(model="far", input=items, tools=TOOLS).output_text == "20 degrees"
    roles = [message["role"] for message in server.service.requests[-1].payload["messages"]]
    assert roles == ["user", "assistant", "tool"]
    with client.responses.stream(model="far", input="tools", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert json.loads(streamed.arguments) == {"city": "Paris"}
    assert "response.function_call_arguments.done" in kinds
    assert "response.output_text.delta" not in kinds


def test_the_form_of_the_answer_and_effort_go_to_remote_models(client: openai.OpenAI, server: Server) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "object"}}, "verbosity": "low"}
    client.responses.create(
        model="far", input="say x", text=text, reasoning={"effort": "low"}, include=["message.output_text.logprobs"]
    )
    request = server.service.requests[-1]
    assert json.loads(request.payload["response_format"]["json_schema"]) == {"name": "s", "schema": {"type": "object"}}
    assert request.extra == {"reasoning_effort": '"low"', "verbosity": '"low"'}
    assert request.payload["logprobs"] is True


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"previous_response_id": "resp_1", "conversation": "c"}, "invalid", "previous_response_id"),
    ({"background": True, "store": False}, "invalid", "background"),
    ({"truncation": "middle"}, "unsupported_parameter", "truncation"),
    ({"include": ["message.input_image.image_url"]}, "unsupported_parameter", "include"),
    ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    ({"text": {"verbosity": "low"}}, "unsupported_parameter", "text.verbosity"),
    ({"max_output_tokens": 0}, "invalid", "max_output_tokens"),
    ({"max_output_tokens": 900_000}, "context_length_exceeded", "max_output_tokens"),
    ({"input": []}, "invalid", "input"),
    ({"input": [{"role": "user", "content": 5}]}, "invalid", "input[0].content"),
    ({"input": [{"type": "web_search_call"}]}, "unsupported_parameter", "input[0]"),
    ({"input": [{"type": "reasoning"}]}, "invalid", "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "invalid", "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "unsupported_parameter", "input[0].content"),
    ({"conversation": "a.b"}, "invalid", "conversation"),
    ({"magic": 1}, "unsupported_parameter", "magic"),
]


@pytest.mark.parametrize(("options", "code", "param"), REFUSED, ids=[str(case[0])[:50] for case in REFUSED])
def test_refusals(server: Server, options: dict[str, Any], code: str, param: str | None) -> None:
    before = len(server.service.requests)
    answer = httpx.post(server.url + "/v1/responses", json={"model": "smol", "input": "say hi", **options})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param), error
    assert len(server.service.requests) == before


def test_failures(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="smol", input="fail", stream=True)
    assert caught.value.code == "engine_failed"
    events = list(client.responses.create(model="smol", input="fail-late abc", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.code == "engine_failed"


def test_a_client_that_leaves_cancels(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/responses", json={"model": "smol", "input": "hold"}, timeout=0.3)
    wait_until(lambda: server.service.requests[-1].request_id in server.service.cancelled)
