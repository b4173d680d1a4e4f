"""The remote engine against scripted servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from kit import engines as kit
from kit.engines import Handler, Server, Sink, run, serving, sse, start
from kit.records import outcome
from penstock.cli.paths import free_port
from penstock.processors.engines.base import Finished, RunFailed, RunSpec, TurnedAway, refuse_unsupported
from penstock.processors.engines.remote.engine import RemoteEngine
from penstock.processors.engines.remote.http import retry_after
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from support import wait_until_async

CODEC = default_codec()


def assert_encodable(output: dict[str, Any]) -> None:
    CODEC.encode(outcome(text_generation=output))


def chat_answer(*texts: str, reason: str | None = "stop") -> httpx.Response:
    events: list[dict[str, Any] | str] = [": keep-alive\n\n"]
    events += [{"choices": [{"delta": {"content": text}, "finish_reason": None}]} for text in texts]
    events += [{"choices": [{"delta": {}, "finish_reason": reason}]}]
    events += [{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, "details": {}}}]
    return sse(*events, "data: [DONE]\n\n")


def spec(number: int = 1, task: str = "text_generation", **fields: Any) -> RunSpec:
    fields.setdefault("messages", [{"role": "user", "content": "Hi"}] if task == "text_generation" else None)
    return RunSpec(run_id=f"r{number}", task=task, model="m", stream=True, **fields)


async def served(answer: httpx.Response | Handler, asked: RunSpec | None = None, **options: Any) -> tuple[Sink, Any]:
    return await kit.served(Server(answer), asked or spec(), **options)


async def test_chat_streams_and_passes_parameters_and_extra_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(chat_answer("Hel", "lo"))
    monkeypatch.setenv("TEST_REMOTE_KEY", "k1")
    async with serving(server, remote_model="big", api_key_env="TEST_REMOTE_KEY") as engine:
        asked = spec(params={"max_tokens": 5, "temperature": 0.5}, extra={"guided_json": '{"a": 1}', "note": "plain"})
        sink, found = await run(engine, asked)
        assert engine.limits().slots == 8
    assert found.output == {"text": "Hello"}
    assert sink.texts == ["Hel", "lo"]
    assert found.usage == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert str(server.requests[0].url) == "http://server/v1/chat/completions"
    assert server.requests[0].headers["authorization"] == "Bearer k1"
    body = server.bodies()[0]
    assert body["model"] == "big"
    assert (body["max_tokens"], body["temperature"], body["guided_json"], body["note"]) == (5, 0.5, {"a": 1}, "plain")


TOOL = {"type": "function", "function": {"name": "f", "parameters": '{"type":"object"}', "description": None}}


def tool_chunk(**call: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}


def ending(reason: str = "stop", index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {}, "finish_reason": reason}]}


@pytest.mark.parametrize(
    ("arguments", "repaired"),
    [('{ "a":1}', '{ "a":1}'), ('{"city": "Ro', "{}"), ("5", "{}"), ('{"a": "\\ud83d"}', '{"a": "�"}')],
)
async def test_tools_are_passed_on_and_their_calls_come_back(arguments: str, repaired: str) -> None:
    said = [
        tool_chunk(index=0, id="c1", type="function", function={"name": "f", "arguments": ""}),
        tool_chunk(index=0, function={"arguments": '{"a"'}),
        tool_chunk(index=1, id="c2", type="function", function={"name": "g", "arguments": "{}"}),
        tool_chunk(index=0, function={"arguments": ":1}"}),
    ]
    server = Server(sse(*said, ending("tool_calls"), "data: [DONE]\n\n"))
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "c0"},
    ]
    params = {
        "tools": [TOOL],
        "tool_choice": '{"type":"function","function":{"name":"f"}}',
        "response_format": {"type": "json_schema", "json_schema": '{"name":"s"}'},
        "min_p": 0.1,
        "presence_penalty": 0.5,
    }
    sink, found = await served(server, spec(messages=messages, params=params, extra={"parallel_tool_calls": "false"}))
    pieces = [piece for one in sink.deltas for piece in one.calls]
    assert [(piece["index"], piece["id"], piece["arguments"], piece["offset"]) for piece in pieces] == [
        (0, "c1", "", 0),
        (0, None, '{"a"', 0),
        (1, "c2", "{}", 0),
        (0, None, ":1}", 4),
    ]
    assert (found.finish_reason, found.output["text"]) == ("tool_calls", "")
    assert found.output["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    (body,) = server.bodies()
    whole = {**call, "function": {"name": "f", "arguments": repaired}}
    assert body["messages"][1:] == [{"role": "assistant", "content": None, "tool_calls": [whole]}, messages[2]]
    assert body["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "s"}}
    assert (body["min_p"], body["presence_penalty"], body["parallel_tool_calls"]) == (0.1, 0.5, False)
    assert_encodable(found.output)


def whole(**message: Any) -> httpx.Response:
    """An answer that is not streamed."""
    body = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": None}
    return httpx.Response(200, content=json.dumps(body), headers={"content-type": "application/json"})


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": None}]}


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (whole(content="whole"), "whole"),
        (whole(content="\ud800"), "\ufffd"),
        (whole(content=None, refusal="I cannot"), "I cannot"),
        (sse(delta(content=None, refusal="I can"), delta(refusal="not"), delta(refusal=None), ending()), "I cannot"),
    ],
    ids=["not streamed", "half a surrogate pair", "a whole refusal", "a streamed refusal"],
)
async def test_a_whole_answer_or_a_refusal_is_told_as_text(answer: httpx.Response, text: str) -> None:
    sink, finished = await served(answer)
    assert finished.output == {"text": text} == {"text": "".join(sink.texts)}


NAMED_A = {"id": "a", "function": {"name": "f", "arguments": ""}}
NAMED_B = {"id": "b", "function": {"name": "g", "arguments": ""}}


@pytest.mark.parametrize(
    "pieces",
    [
        [[NAMED_A], [{"function": {"arguments": "1"}}], [NAMED_B], [{"function": {"arguments": "2"}}]],
        [
            [{"index": None, "id": "a", "function": {"name": "f", "arguments": "1"}}, {**NAMED_B, "index": None}],
            [{"index": None, "id": "", "function": {"name": "", "arguments": "2"}}],
        ],
        [
            [NAMED_A],
            [{**NAMED_A, "function": {"arguments": "1"}}],
            [NAMED_B],
            [{**NAMED_B, "function": {"arguments": "2"}}],
        ],
        [[NAMED_A, NAMED_B], [{"function": {"arguments": "1"}}, {"function": {"arguments": "2"}}]],
    ],
    ids=["one by one", "null", "id repeated", "side by side"],
)
async def test_calls_without_an_index_are_told_apart_by_their_ids(pieces: list[list[dict[str, Any]]]) -> None:
    said = [{"choices": [{"delta": {"tool_calls": piece}, "finish_reason": None}]} for piece in pieces]
    _, finished = await served(sse(*said, ending("tool_calls")))
    assert finished.output["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "1"}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "2"}},
    ]


async def test_a_call_without_an_id_gets_one_and_reused_tokens_are_told() -> None:
    """Ollama's older releases send none; a client has nothing to answer to then."""
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    said = [tool_chunk(index=0, function={"name": "f", "arguments": "{}"}), ending("tool_calls")]
    sink, finished = await served(sse(*said, {"choices": [], "usage": usage}))
    (piece,) = sink.deltas[0].calls
    (call,) = finished.output["tool_calls"]
    assert piece["id"] == call["id"] != ""
    assert (finished.usage or {})["cached_tokens"] == 8


async def test_several_answers_and_their_logprobs() -> None:
    def piece(index: int, text: str, logprob: float) -> dict[str, Any]:
        one = {"token": text, "logprob": logprob, "bytes": [97], "top_logprobs": [{"token": "x", "logprob": -1}]}
        choice = {"index": index, "delta": {"content": text}, "logprobs": {"content": [one]}, "finish_reason": None}
        return {"choices": [choice]}

    answer = [piece(0, "a", -0.5), piece(1, "b", float("-inf")), piece(0, "c", -0.25), ending(), ending("length", 1)]
    sink, found = await served(sse(*answer), spec(params={"n": 2, "logprobs": True}))
    assert "".join(sink.texts) == "ac" == found.output["text"]
    assert [(one["text"], one["finish_reason"]) for one in found.output["choices"]] == [("ac", "stop"), ("b", "length")]
    assert [one["logprob"] for one in found.output["logprobs"]] == [-0.5, -0.25]
    assert [one for delta in sink.deltas for one in delta.logprobs] == found.output["logprobs"]
    assert len(sink.deltas[0].logprobs) == 1, "they come with their text"
    assert found.output["choices"][1]["logprobs"][0]["logprob"] == -9999.0
    assert found.output["logprobs"][0]["top_logprobs"] == [{"token": "x", "logprob": -1.0}]
    assert_encodable(found.output)


@pytest.mark.parametrize("chat", [True, False])
async def test_a_log_probability_that_the_server_does_not_give_is_the_least(chat: bool) -> None:
    if chat:
        tops = [{"token": "b", "logprob": None}]
        one = {"token": "a", "logprob": None, "top_logprobs": tops}
        choice = {"delta": {"content": "a"}, "logprobs": {"content": [one]}, "finish_reason": "stop"}
    else:
        four = {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [{"b": None, "c": -1.0}]}
        choice = {"text": "a", "logprobs": four, "finish_reason": "stop"}
    asked = spec(params={"logprobs": True}, **({} if chat else {"messages": None, "prompt": "x"}))
    sink, found = await served(sse({"choices": [choice]}), asked)
    (token,) = found.output["logprobs"]
    assert token["logprob"] == -9999.0
    assert {"token": "b", "logprob": -9999.0} in token["top_logprobs"]
    assert_encodable(found.output)
    assert [one for delta in sink.deltas for one in delta.logprobs] == [token]


async def test_completion_and_embeddings_of_texts_and_of_tokens() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            return sse({"choices": [{"text": "x", "finish_reason": "length"}]}, "data: [DONE]\n\n")
        data = [{"index": 1, "embedding": [0.0, 1.0]}, {"index": 0, "embedding": [1, 0]}]
        return httpx.Response(200, json={"data": data, "usage": {"prompt_tokens": 3, "total_tokens": 3}})

    server = Server(handler)
    async with serving(server) as engine:
        _, text = await run(engine, spec(1, messages=None, prompt="Once"))
        _, vectors = await run(engine, spec(2, "embedding", inputs=["a", "b"]))
        await run(engine, spec(3, messages=None, params={"prompt_token_ids": [1, 2]}))
        await run(engine, spec(4, "embedding", inputs=[], params={"input_token_ids": [[3]]}))
    assert (text.output["text"], text.finish_reason) == ("x", "length")
    assert vectors.output == {"embeddings": [[1.0, 0.0], [0.0, 1.0]], "dimensions": 2}
    bodies = server.bodies()
    assert [body.get("prompt", body.get("input")) for body in bodies] == ["Once", ["a", "b"], [1, 2], [[3]]]
    assert not any("token_ids" in name for body in bodies for name in body)


PENSTOCKS = ("tool_choice", "response_format", "max_tokens", "prompt_token_ids")


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"params": {"max_tokens": 900_000}}, ContextLengthExceeded, "900000 shall follow; the window is 2048"),
        ({"messages": None, "prompt": "a", "params": {"tools": [TOOL]}}, UnsupportedParameter, r"payload\.tools"),
        ({"params": {"prompt_logprobs": 1}}, UnsupportedParameter, "goes with prompts only"),
        *(({"extra": {name: '"x"'}}, InvalidRequest, name) for name in (*PENSTOCKS, "chat_template", "dimensions")),
        ({"extra": {"X-A": "1", "x-a": "2"}}, InvalidRequest, r"extra\.x-a.* given twice"),
        *(
            ({"extra": {"x-a": value}}, InvalidRequest, r"extra\.x-a is sent as a header")
            for value in ("", " a", "a ", "a\nb", "a\r\nx: y", "é", "\x7f")
        ),
    ],
)
async def test_what_is_refused_before_it_is_sent(fields: dict[str, Any], error: type[Exception], says: str) -> None:
    async with serving(lambda _: chat_answer("x"), window=2_048, caller_headers=["x-a"]) as engine:
        with pytest.raises(error, match=says) as caught:
            await engine.prepare(spec(**fields))
    if "extra." in says:
        assert getattr(caught.value, "param", None) == "extra.x-a"
    async with serving(lambda _: chat_answer("x")) as engine:
        await engine.prepare(spec(params={"max_tokens": 1_000_000}))  # whose window is not known


def lists(tokens: dict[str, float | None]) -> dict[str, Any]:
    tops = [None if value is None else {"x": float("-inf"), name: value} for name, value in tokens.items()]
    return {"tokens": [*tokens], "token_logprobs": [*tokens.values()], "top_logprobs": tops, "text_offset": []}


COUNTS: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}}
ECHO: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "text": "Hi you", "logprobs": lists({"Hi": None, " you": -2.0})}]},
    {"choices": [{"index": 0, "text": "!", "logprobs": lists({"!": -0.5}), "finish_reason": "stop"}]},
    COUNTS,
]


@pytest.mark.parametrize("prompt", ["Hi you", None])
@pytest.mark.parametrize("logprobs", [True, False])
async def test_log_probabilities_of_a_prompt_come_from_its_echo(prompt: str | None, logprobs: bool) -> None:
    server = Server(sse(*ECHO))
    params: dict[str, Any] = {"logprobs": logprobs, "prompt_logprobs": 1, "max_tokens": 1}
    if prompt is None:
        params["prompt_token_ids"] = [4, 5]
    sink, found = await served(server, spec(messages=None, prompt=prompt, params=params))
    (body,) = server.bodies()
    assert (body["echo"], body["logprobs"], body["prompt"]) == (True, 1, prompt or [4, 5])
    assert not {"prompt_logprobs", "top_logprobs", "prompt_token_ids"} & body.keys()
    assert "".join(sink.texts) in ("", "!"), "the prompt is no part of the answer"
    top = [{"token": " you", "logprob": -2.0}, {"token": "x", "logprob": -9999.0}]
    assert found.output["prompt_logprobs"] == [
        {"token": "Hi", "logprob": None},
        {"token": " you", "logprob": -2.0, "top_logprobs": top},
    ]
    assert found.output["text"] == "!"
    assert [one["logprob"] for one in found.output.get("logprobs", [])] == ([-0.5] if logprobs else [])
    assert_encodable(found.output)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"params": {"tools": [TOOL]}}, "payload.tools"),
        ({"params": {"n": 2}}, "payload.n"),
        ({"params": {"response_format": {"type": "json_object"}}}, "payload.response_format"),
        ({"extra": {"logit_bias": "{}"}}, "extra.logit_bias"),
        ({"messages": [{"role": "tool", "content": "", "tool_call_id": "c"}]}, "payload.messages[0].role"),
    ],
)
def test_engines_here_refuse_by_name_what_they_do_not_know(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        refuse_unsupported(spec(**fields))
    assert caught.value.param == param
    refuse_unsupported(spec(params={"n": 1, "tools": [], "presence_penalty": 0.0}, extra={"note": "x"}))


# -- a server that is busy, or away


async def turned_away(engine: RemoteEngine, number: int = 1) -> TurnedAway:
    """The error of a run that the server did not take."""
    _, found = await run(engine, spec(number))
    assert found.retryable_here
    assert isinstance(found.error, TurnedAway), found.error
    return found.error


@pytest.mark.parametrize("status", [429, 503])
async def test_what_a_busy_server_turns_away_goes_back_and_nothing_is_sent_for_as_long_as_it_says(status: int) -> None:
    async with serving(lambda _: httpx.Response(status, headers={"retry-after": "30"})) as engine:
        busy: list[float] = []
        engine.on_busy = busy.append
        error = await turned_away(engine)
        assert 30 <= busy[0] <= 36
        assert error.retry_after_s == busy[0]


async def test_refusals_shrink_the_limit_and_answers_let_it_grow_again() -> None:
    answers = [httpx.Response(429), *(chat_answer("ok") for _ in range(40))]
    async with serving(Mock(side_effect=answers), slots=2) as engine:
        told: list[int] = []
        engine.on_limits = lambda limits: told.append(limits.slots)
        await turned_away(engine)
        assert (told, engine.limits().slots) == ([1], 1)
        for number in range(2, 6):
            await run(engine, spec(number))
        assert (told, engine.limits().slots) == ([1, 2], 2)


async def test_a_server_that_does_not_answer_in_time_gets_less() -> None:
    async def hang(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(hang, slots=8, timeout_s=0.1) as engine:
        _, found = await run(engine, spec())
        assert (found.error.code, found.retryable_here, engine.limits().slots) == ("engine_failed", True, 5)


async def test_patience_ends_with_the_server_s_own_words() -> None:
    body = {"error": {"message": "quota used up"}}
    _, found = await served(httpx.Response(429, headers={"retry-after": "5"}, json=body), patience_s=1)
    assert (found.error.code, found.error.retry_after_s, found.retryable_here) == ("overloaded", 5.0, True)
    assert "quota used up" in found.error.message


async def test_a_server_that_ends_the_connection_behind_a_stream_is_asked_on_another() -> None:
    """As llama.cpp's does, though it has said `Keep-Alive: timeout=5`."""
    connections = set[object]()

    def answer(request: httpx.Request) -> httpx.Response:
        if (connection := request.extensions["connection"]) in connections:
            raise OSError
        connections.add(connection)
        return chat_answer("ok")

    async with serving(answer) as engine:
        found = [(await run(engine, spec(number)))[1] for number in range(3)]
    assert [type(one) for one in found] == [Finished] * 3


async def test_a_server_that_is_away_has_taken_nothing() -> None:
    nobody = kit.Resolver(free_port())
    engine = RemoteEngine("m", "http://server", {}, resolver=nobody)
    await engine.start()
    await turned_away(engine)
    await engine.stop()
    engine = RemoteEngine("m", "http://server", {"patience_s": 0.1}, resolver=nobody)
    await engine.start()
    _, found = await run(engine, spec())
    await engine.stop()
    assert not isinstance(found.error, TurnedAway)
    assert found.error.message == "the server of m cannot be reached: Connection refused"  # callers see no address


async def test_a_server_that_does_not_read_what_it_is_sent_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.processors.engines.remote.http.CONNECT_S", 0.1)
    release = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        writer.close()

    listener = await asyncio.start_server(stall, "127.0.0.1", 0, limit=1)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    engine = RemoteEngine("m", url, {"timeout_s": 0.3, "window": 10_000_000})
    await engine.start()
    _, found = await run(engine, spec(messages=[{"role": "user", "content": "x" * (20 << 20)}]))
    release.set()
    listener.close()
    await engine.stop()
    assert (found.error.code, found.retryable_here, engine.limits().slots) == ("engine_failed", True, 5)


async def test_the_budget_holds_runs_back_and_is_settled_by_what_they_used() -> None:
    async with serving(lambda _: chat_answer("ok"), tokens_per_minute=600) as engine:
        busy: list[float] = []
        engine.on_busy = busy.append
        await run(engine, spec(1, params={"max_tokens": 10_000}))  # of which the answer used 9
        assert len(busy) == 1  # while it ran, it counted with all that it might use
        await run(engine, spec(2, params={"max_tokens": 10_000}))
        sink = await start(engine, spec(3, params={"max_tokens": 10_000}))
        await turned_away(engine, 4)  # the third runs
        assert isinstance(await asyncio.wait_for(sink.done, 10), Finished)
        assert 60 < busy[-1] < 10_000 / 10


async def test_headers_are_sent_and_those_of_the_environment_are_secrets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(httpx.Response(500))
    monkeypatch.setenv("TEST_TENANT_TOKEN", "s3cret")
    headers = {"x-gateway-inference-objective": "batch", "X-Tenant": {"env": "TEST_TENANT_TOKEN"}}
    with caplog.at_level("DEBUG"):
        _, found = await served(server, headers=headers)
    assert server.requests[0].headers["x-gateway-inference-objective"] == "batch"
    assert server.requests[0].headers["x-tenant"] == "s3cret"
    assert "s3cret" not in caplog.text + str(found.error)


def refused(status: int, error: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": error})


ODD = [
    b'["no", "object"]',
    b"[]",
    b"null",
    b'"text"',
    b'{"choices": null}',
    b'{"choices": [null]}',
    b'{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}',
    b'{"choices": [{"message": {"content": ["a"]}, "finish_reason": "stop"}]}',
    b'{"choices": [{"message": "x", "finish_reason": "stop"}]}',
    b'{"choices": 5}',
    b"{" * 100_000,
]
"""Answers of any shape."""


def in_both_forms(body: bytes) -> list[httpx.Response]:
    events = b"data: " + body.replace(b"message", b"delta") + b"\n\n"
    kinds = {"application/json": body, "text/event-stream": events}
    return [httpx.Response(200, content=data, headers={"content-type": kind}) for kind, data in kinds.items()]


UNWRITABLE = b'{"error": {"message": "bad \\ud800"}}'
ECHO_ASKED: dict[str, Any] = {"messages": None, "prompt": "Hi you", "params": {"prompt_logprobs": 0}}


@pytest.mark.parametrize(
    ("answer", "asked", "code", "again"),
    [
        (refused(400, {"message": "bad"}), {}, "invalid", False),
        (refused(400, {"message": "long", "code": "context_length_exceeded"}), {}, "context_length_exceeded", False),
        (refused(404, {"message": "no model"}), {}, "model_not_found", False),
        (refused(401, {"message": "key"}), {}, "engine_failed", True),
        (refused(500, "plain text"), {}, "engine_failed", True),
        (httpx.Response(400, content=UNWRITABLE), {}, "invalid", False),
        (httpx.Response(500, content=UNWRITABLE), {}, "engine_failed", True),
        (chat_answer("half", reason=None), {}, "engine_failed", True),
        (sse(delta(content="half"), {"error": {"message": "broke"}}), {}, "engine_failed", True),
        (sse("data: {not json\n\n"), {}, "engine_failed", True),
        *((answer, {}, "engine_failed", True) for body in ODD for answer in in_both_forms(body)),
        (
            sse(ending(), {"choices": [{"index": 1, "delta": {"content": "x"}}]}),
            {"params": {"n": 2}},
            "engine_failed",
            True,
        ),
        (chat_answer("x"), {"messages": [{"role": "user", "content": "\ud800"}]}, "invalid", False),
        (
            sse({"choices": [{"text": "!", "finish_reason": "stop"}]}, COUNTS),
            ECHO_ASKED,
            "unsupported_parameter",
            False,
        ),
        (sse(*ECHO[1:]), ECHO_ASKED, "unsupported_parameter", False),
    ],
)
async def test_refusals_and_answers_that_are_none_are_typed(
    answer: httpx.Response, asked: dict[str, Any], code: str, again: bool
) -> None:
    _, found = await served(answer, spec(**asked))
    assert (found.error.code, found.retryable_here) == (code, again)
    assert isinstance(found.error, UnsupportedParameter) == (asked is ECHO_ASKED)
    found.error.message.encode()


class Endless(httpx.AsyncByteStream):
    """A stream that goes on until it is closed."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
            await asyncio.sleep(0.001)

    async def aclose(self) -> None:
        self.closed.set()


class Blanks(Endless):
    """A body without an end."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65_536
            await asyncio.sleep(0)


@pytest.mark.parametrize("status", [500, 200])
@pytest.mark.parametrize("task", ["text_generation", "embedding", "image_generation"])
async def test_an_answer_is_not_read_beyond_its_limit(monkeypatch: pytest.MonkeyPatch, task: str, status: int) -> None:
    monkeypatch.setattr("penstock.processors.engines.remote.http.MOST_BYTES", 1 << 20)
    stream = Blanks()
    answer = httpx.Response(status, headers={"content-type": "application/json"}, stream=stream)
    payload = {"prompt": "a fox"} if task == "image_generation" else {"input": ["a fox"]}
    _, found = await asyncio.wait_for(served(answer, spec(task=task, payload=payload)), 10)
    assert (found.error.code, found.retryable_here) == ("engine_failed", status == 500)
    assert stream.closed.is_set()


async def test_cancel_closes_the_stream_and_tells_nothing_more() -> None:
    stream = Endless()
    async with serving(lambda _: httpx.Response(200, stream=stream), slots=1) as engine:
        sink = await start(engine, spec())
        await wait_until_async(lambda: sink.deltas, 5)
        engine.cancel("r1")
        told = len(sink.deltas)
        await asyncio.wait_for(stream.closed.wait(), 5)
        assert len(sink.deltas) == told
        assert not sink.done.done()


async def test_a_run_cancelled_before_it_began_tells_nothing() -> None:
    async with serving(lambda _: chat_answer("x"), slots=1) as engine:
        sink = await start(engine, spec(1))
        engine.cancel("r1")
        _, found = await run(engine, spec(2))
    assert isinstance(found, Finished)
    assert not sink.done.done()


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", '{"a": [NaN]}'])
async def test_numbers_that_json_does_not_have_are_passed_on_as_text(text: str) -> None:
    server = Server(chat_answer("x"))
    _, finished = await served(server, spec(extra={"a": text}))
    assert isinstance(finished, Finished)
    assert server.bodies()[0]["a"] == text


async def test_a_user_in_the_url_beside_an_authorization_is_refused_at_the_start() -> None:
    engine = RemoteEngine("m", "https://me:secret@server", {"headers": {"Authorization": "Bearer k"}})
    with pytest.raises(InvalidRequest, match="remove one of them"):
        await engine.start()


@pytest.mark.parametrize("options", [{"api_key_env": "NOT_SET"}, {"headers": {"x-a": {"env": "NOT_SET"}}}])
async def test_a_secret_that_is_not_set_is_said_at_the_start(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="NOT_SET"):
        await RemoteEngine("m", "http://server", options).start()


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("86400", 60.0), (formatdate(0, usegmt=True), 0.0), ("soon", None)]
)
def test_retry_after_in_both_forms(value: str, seconds: float | None) -> None:
    assert retry_after(Mock(headers={"retry-after": value})) == seconds


# -- what a server may say, and what a sink may do: every run ends exactly once


async def test_half_a_surrogate_pair_is_replaced_and_two_halves_are_joined() -> None:
    texts = ["a\ud83d", "\ude00b", "\ud800c\udfff", "\ud83d", " d", "\ud83d"]
    sink, found = await served(chat_answer(*texts, reason="st\ud800op"))
    assert found.output["text"] == "a\U0001f600b\ufffdc\ufffd\ufffd d\ufffd" == "".join(sink.texts)
    assert found.finish_reason == "st\ufffdop"


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
async def test_only_line_ends_of_the_protocol_part_a_stream(line_end: str) -> None:
    """JSON may hold these characters as they are, and some libraries take them for ends of lines."""
    text = "a\u2028b\u2029c\u0085d"
    said = [{"choices": [{"delta": {"content": text}, "finish_reason": None}]}, ending()]
    body = "".join(f"data: {json.dumps(event, ensure_ascii=False)}{line_end * 2}" for event in said).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 3):
            yield body[at : at + 3]

    kind = {"content-type": "text/event-stream"}
    sink, finished = await served(httpx.Response(200, content=pieces(), headers=kind))
    assert isinstance(finished, Finished)
    assert sink.texts == [text]


async def test_odd_finish_reasons_and_counts_do_not_reach_the_outcome() -> None:
    usage = {"prompt_tokens": 10**30, "completion_tokens": -1, "total_tokens": True, "more": {"a": 1}}
    answer = {"choices": [{"message": {"content": "x"}, "finish_reason": {"a": 1}}], "usage": usage}
    _, found = await served(httpx.Response(200, json=answer))
    assert found.finish_reason == "{'a': 1}"
    assert found.usage == {"total_tokens": 1}


@pytest.mark.parametrize("event", ["on_delta", "on_finished"])
async def test_a_sink_that_raises_is_a_fault_and_ends_its_run(event: str, faults: list[str]) -> None:
    refuse = Mock(side_effect=UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"))
    async with serving(lambda _: chat_answer("a", "b")) as engine:
        asked, sink = spec(), Sink()
        setattr(sink, event, refuse)
        engine.run(asked, await engine.prepare(asked), sink)
        await wait_until_async(lambda: faults, 10)
        await wait_until_async(lambda: not engine._tasks, 5)
        assert not sink.done.done(), "the request is not to blame"


async def test_after_stop_a_run_is_refused() -> None:
    async with serving(lambda _: chat_answer("x")) as engine:
        asked = spec()
        prepared = await engine.prepare(asked)
    sink = Sink()
    engine.run(asked, prepared, sink)
    refused = sink.done.result()
    assert isinstance(refused, RunFailed)
    assert refused.retryable_here


@pytest.mark.parametrize("task", ["text_generation", "embedding"])
async def test_entries_of_extra_that_the_model_lists_are_headers_and_the_others_stay_fields(task: str) -> None:
    vectors = {"data": [{"index": 0, "embedding": [1.0]}]}
    server = Server(chat_answer("x") if task == "text_generation" else httpx.Response(200, json=vectors))
    options = {"headers": {"x-a": "model", "x-b": "model"}, "caller_headers": ["X-A", "x-c"]}
    asked = spec(task=task, inputs=["t"], extra={"x-A": "caller", "x-b": "caller", "x-c": "c d"})
    _, found = await served(server, asked, **options)
    assert isinstance(found, Finished), found
    headers = server.requests[0].headers
    assert (headers["x-a"], headers["x-b"], headers["x-c"]) == ("caller", "model", "c d")
    body = server.bodies()[0]
    assert (body.get("x-A"), body.get("x-c"), body["x-b"]) == (None, None, "caller")
