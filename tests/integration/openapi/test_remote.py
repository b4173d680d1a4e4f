"""What stock clients send goes the whole way to a remote server and back: gateway, Kafka, worker, server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

if TYPE_CHECKING:
    from .conftest import Remote

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)


def test_tools_and_their_answers(client: openai.OpenAI, remote: Remote) -> None:
    answer = client.chat.completions.create(
        model="far", messages=HELLO, tools=[TOOL], tool_choice="auto", parallel_tool_calls=False, presence_penalty=0.5
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert answer.choices[0].finish_reason == "tool_calls"
    asked = remote.asked[-1]
    assert asked["tools"] == [TOOL]
    assert (asked["tool_choice"], asked["parallel_tool_calls"], asked["presence_penalty"]) == ("auto", False, 0.5)
    said = [answer.choices[0].message.model_dump(), {"role": "tool", "tool_call_id": "c1", "content": "20"}]
    again = client.chat.completions.create(model="far", messages=[*HELLO, *said], tools=[TOOL])
    assert again.choices[0].message.content == "Hello 0"
    assert [message["role"] for message in remote.asked[-1]["messages"]] == ["user", "assistant", "tool"]
    assert remote.asked[-1]["messages"][1]["tool_calls"][0]["id"] == "c1"


def test_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="far", messages=HELLO, tools=[TOOL]) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    with client.responses.stream(model="far", input="Hello", instructions="Be brief.") as events:
        answer = events.get_final_response()
    assert (answer.output_text, answer.status) == ("Hello 0", "completed")
    assert answer.usage is not None
    assert answer.usage.total_tokens == 9


def test_several_answers_forms_and_tokens(client: openai.OpenAI, remote: Remote) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    answer = client.chat.completions.create(
        model="far", messages=HELLO, n=3, response_format=form, logit_bias={"7": -100}, extra_body={"min_p": 0.25}
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello 0", "Hello 1", "Hello 2"]
    asked = remote.asked[-1]
    assert (asked["response_format"], asked["logit_bias"], asked["min_p"]) == (form, {"7": -100}, 0.25)
    assert client.embeddings.create(model="far", input=[[1, 2], [3]]).data[1].embedding == [0.5, 1.0]
    assert remote.asked[-1]["input"] == [[1, 2], [3]]


def test_the_native_result_has_it_too(url: str) -> None:
    body = {"task": "text_generation", "model": "far", "payload": {"messages": HELLO, "tools": [TOOL]}}
    request = httpx.post(f"{url}/v1/requests", json=body).json()["request_id"]
    found = httpx.get(f"{url}/v1/requests/{request}", params={"wait": 60}, timeout=70).json()
    assert (found["status"], found["result"]["finish_reason"]) == ("completed", "tool_calls")
    assert found["result"]["tool_calls"][0]["function"]["name"] == "weather"
    assert "logprobs" not in found["result"]


def test_other_models_refuse_it_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="noop", messages=HELLO, tools=[TOOL])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tools")
