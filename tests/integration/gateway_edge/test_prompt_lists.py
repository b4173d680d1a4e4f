"""Calls that several requests answer, with the stock client: lists of prompts, and several answers of a stream."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from penstock.gateway.openai.several import PART
from support import wait_until

from .conftest import Server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=20)


def test_a_list_of_prompts_is_answered_in_its_order(client: openai.OpenAI, server: Server) -> None:
    prompts: Any = ["slow first", [1, 2], "say third"]
    answer = client.completions.create(model="far", prompt=prompts, extra_body={"metadata": {"k": "v"}})
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "first"), (1, "tokens"), (2, "third")]
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens"}) == {
        "prompt_tokens": 21,
        "completion_tokens": 15,
    }
    requests = server.service.requests[-3:]
    assert [request.metadata for request in requests] == [{"k": "v", PART: f"{number}/3"} for number in (1, 2, 3)]
    assert answer.id == f"cmpl-{requests[0].request_id}"
    assert not server.service.cancelled


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("last", ["expire", "busy"])
def test_one_that_fails_fails_the_call_and_ends_the_others(
    client: openai.OpenAI, server: Server, stream: bool, last: str
) -> None:
    with pytest.raises(openai.APIStatusError) as failed:
        client.completions.create(model="smol", prompt=["hold", "hold", last], stream=stream)
    assert failed.value.code == {"expire": "expired", "busy": "overloaded"}[last]
    held = [one.request_id for one in server.service.requests if one.payload.get("prompt") == "hold"]
    wait_until(lambda: set(held) <= set(server.service.cancelled), 10)
    wait_until(lambda: server.service.open_subscriptions == 0, 10)


def test_a_list_is_streamed_by_index_and_leaving_cancels_all(client: openai.OpenAI, server: Server) -> None:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    texts = {0: "", 1: ""}
    usage = None
    for chunk in client.completions.create(model="smol", prompt=["say abcdef", "say xyz"], echo=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == {0: "say abcdefabcdef", 1: "say xyzxyz"}
    assert usage is not None
    assert usage.total_tokens == 24
    stream = client.completions.create(model="smol", prompt=["hold a", "hold b"], stream=True)
    assert {next(stream).choices[0].text, next(stream).choices[0].text} == {"a", "b"}, "none waits for the other"
    stream.close()
    held = [one.request_id for one in server.service.requests[-2:]]
    wait_until(lambda: set(held) <= set(server.service.cancelled), 10)


def test_answers_of_a_stream_come_side_by_side(client: openai.OpenAI, server: Server) -> None:
    messages: Any = [{"role": "user", "content": "hold Hello"}]
    stream = client.chat.completions.create(model="smol", messages=messages, n=3, seed=5, stream=True)
    told: set[int] = set()
    for chunk in stream:
        if chunk.choices[0].delta.content:
            told.add(chunk.choices[0].index)
        if told == {0, 1, 2}:
            break
    stream.close()
    assert [request.payload["seed"] for request in server.service.requests[-3:]] == [5, 6, 7]


def test_a_prompt_that_is_refused_is_named_and_none_is_sent(client: openai.OpenAI, server: Server) -> None:
    before = len(server.service.requests)
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="smol", prompt=[[1, 2], [-1]])
    assert refused.value.param == "prompt[1]"
    assert len(server.service.requests) == before
