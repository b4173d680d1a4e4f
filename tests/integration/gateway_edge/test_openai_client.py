"""The stock OpenAI client against the OpenAI routes: answers, streams, refusals, failures and disconnects."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from support import wait_until

if TYPE_CHECKING:
    from .conftest import Server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=20)


def ask(client: openai.OpenAI, prompt: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": prompt}]
    return client.chat.completions.create(**{"model": "smol", "messages": messages, **options})


def streamed(client: openai.OpenAI, prompt: str, **options: Any) -> tuple[str, list[Any]]:
    chunks = list(ask(client, prompt, stream=True, **options))
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices), chunks


def test_a_plain_answer(server: Server, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="default", messages=[{"role": "user", "content": "say Paris 🗼"}]
    )
    answer = raw.parse()
    request = server.service.requests[-1]
    assert answer.id == f"chatcmpl-{request.request_id}"
    assert raw.headers["x-request-id"] == request.request_id
    assert answer.object == "chat.completion"
    assert answer.model == "smol"
    assert answer.choices[0].message.content == "Paris 🗼"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 5, 12)
    assert answer.created > 1_700_000_000


def test_a_stream_is_the_same_text(server: Server, client: openai.OpenAI) -> None:
    text, chunks = streamed(client, "say The capital of France", stream_options={"include_usage": True})
    assert text == "The capital of France"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{server.service.requests[-1].request_id}"}
    text, chunks = streamed(client, "quiet nothing before the end")
    assert text == "nothing before the end"
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_stream_ends_with_done(server: Server) -> None:
    body = {"model": "smol", "messages": [{"role": "user", "content": "say hi"}], "stream": True}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-request-id"] == server.service.requests[-1].request_id
    assert answer.text.endswith("data: [DONE]\n\n")


def test_an_empty_answer_is_still_an_answer(client: openai.OpenAI) -> None:
    assert ask(client, "say ").choices[0].message.content == ""
    text, chunks = streamed(client, "say ")
    assert text == ""
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(model="smol", prompt="say hello", max_tokens=6)
    assert answer.choices[0].text == "hello"
    assert answer.id.startswith("cmpl-")
    assert server.service.requests[-1].payload["max_tokens"] == 6
    chunks = list(client.completions.create(model="smol", prompt=["say hello"], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "hello"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert server.service.requests[-1].payload["max_tokens"] == 16


def test_embeddings_in_both_encodings(client: openai.OpenAI, server: Server) -> None:
    stock = client.embeddings.create(model="org/minilm", input=["a", "b"])
    plain = client.embeddings.create(model="org/minilm", input=["a", "b"], encoding_format="float")
    assert [d.embedding for d in stock.data] == [d.embedding for d in plain.data] == [[0.5, -0.25, 0], [0.5, -0.25, 1]]
    assert [d.index for d in plain.data] == [0, 1]
    assert stock.usage.prompt_tokens == 7
    body = {"model": "org/minilm", "input": "a", "encoding_format": "base64"}
    raw = httpx.post(server.url + "/v1/embeddings", json=body).json()["data"][0]["embedding"]
    assert len(base64.b64decode(raw)) == 12
    assert len(client.embeddings.create(model="org/minilm", input=[[1, 2, 3]]).data) == 1
    assert len(client.embeddings.create(model="far", input=[[1, 2, 3], [4]]).data) == 2
    assert server.service.requests[-1].payload["input_token_ids"] == [[1, 2, 3], [4]]
    assert len(client.embeddings.create(model="far", input=[1, 2, 3]).data) == 1


def test_models(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"smol", "org/minilm", "far"}
    assert client.models.retrieve("org/minilm").owned_by == "penstock"
    assert client.models.retrieve("default").id == "smol"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("none")
    assert caught.value.code == "model_not_found"
    assert "there are far, org/minilm, smol" in caught.value.message


TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": True}}]


def test_tools_go_to_remote_models_and_their_calls_come_back(client: openai.OpenAI, server: Server) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = ask(client, "tools", model="far", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    request = server.service.requests[-1]
    assert request.payload["tools"][0]["function"]["parameters"] == '{"type":"object"}'
    assert json.loads(request.payload["tool_choice"]) == choice
    assert request.extra == {"parallel_tool_calls": "false"}
    (call,) = answer.choices[0].message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("call_1", "weather", '{"city":"Paris"}')
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)
    again = [
        {"role": "user", "content": "tools"},
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "say 20 degrees"},
    ]
    assert ask(client, "", model="far", messages=again, tools=TOOLS).choices[0].message.content == "20 degrees"


def test_calls_of_tools_are_streamed_as_the_stock_client_reads_them(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="far", messages=[{"role": "user", "content": "tools"}], tools=TOOLS
    ) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = answer.choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", '{"city":"Paris"}')
    assert answer.choices[0].finish_reason == "tool_calls"


def test_several_answers_and_logprobs(client: openai.OpenAI, server: Server) -> None:
    options: dict[str, Any] = {"model": "far", "n": 3, "logprobs": True, "top_logprobs": 2}
    answer = ask(client, "several x", **options)
    assert [choice.message.content for choice in answer.choices] == ["x0", "x1", "x2"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].logprobs.content[0].logprob == -0.5
    chunks = list(ask(client, "several x", stream=True, **options))
    texts = ["", "", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["x0"] * 3, "each is the only answer of a request"
    assert sorted(found.choices[0].index for found in chunks if found.choices[0].finish_reason) == [0, 1, 2]
    assert [request.payload["n"] for request in server.service.requests[-3:]] == [1, 1, 1]
    assert any(chunk.choices[0].logprobs for chunk in chunks)


def test_what_stock_clients_send_reaches_remote_models(client: openai.OpenAI, server: Server) -> None:
    prediction: Any = {"type": "content", "content": "abc"}
    ask(
        client,
        "say hi",
        model="far",
        presence_penalty=0.5,
        frequency_penalty=-1,
        logit_bias={"17": -100},
        prediction=prediction,
        reasoning_effort="low",
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
        extra_body={"min_p": 0.1, "penstock": {"extra": {"note": "x"}}},
    )
    request = server.service.requests[-1]
    payload = request.payload
    assert (payload["presence_penalty"], payload["frequency_penalty"], payload["min_p"]) == (0.5, -1.0, 0.1)
    assert json.loads(payload["response_format"]["json_schema"])["name"] == "s"
    assert {name: json.loads(text) for name, text in request.extra.items() if name != "note"} == {
        "logit_bias": {"17": -100},
        "prediction": prediction,
        "reasoning_effort": "low",
    }
    assert request.extra["note"] == "x"
    assert client.completions.create(model="far", prompt=[1, 2]).choices[0].text == "tokens"
    assert server.service.requests[-1].payload["prompt_token_ids"] == [1, 2]


def test_the_fields_reach_the_request(client: openai.OpenAI, server: Server) -> None:
    ask(
        client,
        [{"type": "text", "text": "say "}, {"type": "text", "text": "hi"}],  # type: ignore[arg-type]
        max_completion_tokens=9,
        temperature=0,
        top_p=0.5,
        stop="END",
        seed=3,
        user="u1",
        metadata={"trace": "t1"},
        service_tier="flex",
        n=1,
        frequency_penalty=0,
        response_format={"type": "text"},
        extra_body={"penstock": {"conversation_id": 17, "ttl_ms": 5000, "top_k": 4, "context": {"last_turns": 2}}},
    )
    request = server.service.requests[-1]
    payload = request.payload
    assert payload["messages"] == [{"role": "user", "content": "say hi"}]
    assert payload["max_tokens"] == 9
    assert (payload["temperature"], payload["top_p"], payload["top_k"], payload["seed"]) == (0, 0.5, 4, 3)
    assert payload["stop"] == ["END"]
    assert (request.user_id, request.metadata, request.priority) == ("u1", {"trace": "t1"}, 8)
    assert (request.conversation_id, request.ttl_ms, request.stream) == ("17", 5000, False)
    ask(client, "say hi", service_tier="priority", extra_body={"penstock": {"priority": 1}})
    assert server.service.requests[-1].priority == 1


def test_an_answer_can_be_sent_back(client: openai.OpenAI, server: Server) -> None:
    answer = ask(client, "say hi").choices[0].message.model_dump()
    messages = [{"role": "developer", "content": "be kind"}, answer, {"role": "user", "content": "say more"}]
    assert ask(client, "", messages=messages).choices[0].message.content == "more"
    assert [m["role"] for m in server.service.requests[-1].payload["messages"]] == ["system", "assistant", "user"]


TAKEN: list[dict[str, Any]] = [
    {"n": 2},
    {"logit_bias": {"1": 5}},
    {"logprobs": True},
    {"presence_penalty": 0.1},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "required"},
]


@pytest.mark.parametrize("options", TAKEN, ids=[str(case)[:50] for case in TAKEN])
def test_what_local_models_know_reaches_them(client: openai.OpenAI, server: Server, options: dict[str, Any]) -> None:
    ask(client, "say hi", **options)
    request = server.service.requests[-1]
    for name in options:
        told = request.payload.get(name) or request.extra.get(name)
        assert told is not None, name


REFUSED: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "no-such"}, 404, "model_not_found", "model"),
    ({"model": "org/minilm"}, 404, "model_not_found", "model"),
    ({"max_tokens": -1}, 400, "invalid", "max_tokens"),
    ({"max_tokens": "7"}, 400, "invalid", "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, 400, "invalid", "max_tokens"),
    ({"temperature": 9.0}, 400, "invalid", "temperature"),
    ({"temperature": float("nan")}, 400, "invalid", None),
    ({"n": 1001}, 400, "invalid", "n"),
    ({"n": True}, 400, "invalid", "n"),
    ({"max_tokens": 900_000}, 400, "context_length_exceeded", "max_tokens"),
    ({"prediction": {"type": "content", "content": "x"}}, 400, "unsupported_parameter", "prediction"),
    ({"verbosity": "low"}, 400, "unsupported_parameter", "verbosity"),
    ({"service_tier": "scale"}, 400, "unsupported_parameter", "service_tier"),
    ({"extra_body": {"top_k": -5}}, 400, "invalid", "top_k"),
    ({"extra_body": {"use_beam_search": True}}, 400, "unsupported_parameter", "use_beam_search"),
    ({"extra_body": {"chat_template": "x"}}, 400, "unsupported_parameter", "chat_template"),
    ({"extra_body": {"penstock": {"magic": 1}}}, 400, "unsupported_parameter", "penstock.magic"),
    ({"extra_body": {"penstock": {"priority": -1}}}, 400, "invalid", "penstock.priority"),
    ({"extra_body": {"penstock": {"ttl_ms": "x"}}}, 400, "invalid", "penstock.ttl_ms"),
    ({"extra_body": {"penstock": {"callback_url": "http://x"}}}, 400, "unsupported_parameter", "callback_url"),
    ({"messages": []}, 400, "invalid", "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid", "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        400,
        "unsupported_parameter",
        "messages[0].content[0]",
    ),
]


@pytest.mark.parametrize(("options", "status", "code", "param"), REFUSED, ids=[str(case[0])[:50] for case in REFUSED])
def test_refusals(
    client: openai.OpenAI, server: Server, options: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    before = len(server.service.requests)
    body = {"model": "smol", "messages": [{"role": "user", "content": "say hi"}], **options}
    body.update(body.pop("extra_body", {}))
    answer = httpx.post(
        server.url + "/v1/chat/completions",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code), error
    if param is not None:
        assert error["param"] == param, error
    assert error["retryable"] is False
    assert answer.headers["x-should-retry"] == "false"
    assert len(server.service.requests) == before, "nothing of it was submitted"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "status", "code", "param"),
    [
        ("fail", 500, "engine_failed", None),
        ("too-long", 400, "context_length_exceeded", "messages"),
        ("expire", 504, "expired", None),
        ("cancelled", 409, "cancelled", None),
    ],
)
def test_final_failures_are_not_retried(
    server: Server, prompt: str, status: int, code: str, param: str | None, stream: bool
) -> None:
    retrying = openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=3)
    before = len(server.service.requests)
    with pytest.raises(openai.APIStatusError) as caught:
        ask(retrying, prompt, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.code == code
    assert caught.value.param == param
    assert caught.value.response.headers["x-should-retry"] == "false"
    request = server.service.requests[-1]
    assert caught.value.request_id == request.request_id
    assert caught.value.response.json()["error"]["request_id"] == request.request_id
    assert len(server.service.requests) == before + 1
    assert request.request_id not in server.service.cancelled


def test_overload_may_be_retried(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, "busy")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "3"
    assert "x-should-retry" not in caught.value.response.headers


def test_an_unknown_exception_tells_nothing(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, "unscripted")
    assert caught.value.code == "internal"
    assert "secret" not in caught.value.response.text


def until_error(stream: Any) -> tuple[str, openai.APIError]:
    """The text that came before the stream's error."""
    seen = ""
    try:
        for chunk in stream:
            seen += chunk.choices[0].delta.content or ""
    except openai.APIError as error:
        return seen, error
    raise AssertionError("the stream ended well")


def test_a_failure_mid_stream_is_an_error_event(client: openai.OpenAI) -> None:
    seen, error = until_error(ask(client, "fail-late abc", stream=True))
    assert seen == "abc"
    assert error.code == "engine_failed"


def test_a_restart_that_agrees_is_not_seen(client: openai.OpenAI) -> None:
    assert streamed(client, "restart The ca|The capital")[0] == "The capital"


def test_a_restart_with_another_text_is_a_stream_error(client: openai.OpenAI, server: Server) -> None:
    seen, error = until_error(ask(client, "restart The ca|Once upon", stream=True))
    assert seen == "The ca"
    assert error.code == "stream_restarted"
    wait_until(lambda: server.service.requests[-1].request_id in server.service.cancelled)


@pytest.mark.parametrize("prompt", ["hold", "hold some"])
def test_a_client_that_leaves_a_stream_cancels(client: openai.OpenAI, server: Server, prompt: str) -> None:
    body = {"model": "smol", "messages": [{"role": "user", "content": prompt}], "stream": True}
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=0.3) as answer,
    ):
        for _ in answer.iter_lines():
            pass
    wait_until(lambda: server.service.requests[-1].request_id in server.service.cancelled)
    wait_until(lambda: server.service.open_subscriptions == 0)


def test_a_client_that_leaves_a_plain_answer_cancels(server: Server) -> None:
    body = {"model": "smol", "messages": [{"role": "user", "content": "hold"}]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/chat/completions", json=body, timeout=0.3)
    wait_until(lambda: server.service.requests[-1].request_id in server.service.cancelled)
    wait_until(lambda: server.service.open_subscriptions == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_named_its_request_can_come_back(server: Server, stream: bool) -> None:
    """Its retry found its own cancel (409), and one of two callers ended the other's request."""
    body = {"model": "smol", "messages": [{"role": "user", "content": "hold"}], "stream": stream}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + "/v1/chat/completions", json=body, timeout=0.3, headers={"Idempotency-Key": f"k{stream}"}
        )
    request_id = server.service.requests[-1].request_id
    wait_until(lambda: server.service.open_subscriptions == 0)
    test_a_client_that_leaves_a_plain_answer_cancels(server)  # by then the cancel of the first would have been seen
    assert request_id not in server.service.cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_others_follow_goes_on(server: Server, stream: bool) -> None:
    body = {"model": "smol", "messages": [{"role": "user", "content": "hold"}], "stream": stream}
    server.service.followed_elsewhere = True
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/chat/completions", json=body, timeout=0.3)
        request_id = server.service.requests[-1].request_id
        wait_until(lambda: server.service.open_subscriptions == 0)
    finally:
        server.service.followed_elsewhere = False
    test_a_client_that_leaves_a_plain_answer_cancels(server)
    assert request_id not in server.service.cancelled


async def test_the_async_client_streams_at_the_same_time(server: Server) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused") as client:

        async def one(number: int) -> str:
            stream = await client.chat.completions.create(
                model="smol", messages=[{"role": "user", "content": f"say answer {number}"}], stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*map(one, range(20))) == [f"answer {n}" for n in range(20)]
