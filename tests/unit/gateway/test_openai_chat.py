"""OpenAI streams: comments while nothing comes, frames become events, nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from gateway_parts import service_with
from kit.gateway_http import no_body
from kit.records import subscribed as subscribed_to
from penstock.gateway.edge.errors import FinalFailure
from penstock.gateway.openai.chat_answers import ChunkWriter, Json, text_usage
from penstock.gateway.openai.chat_bodies import EmbeddingBody
from penstock.gateway.openai.endpoints import EMBEDDING, Made
from penstock.gateway.openai.exchange import AnswerStream, stream_events
from penstock.gateway.openai.routes import Exchange
from penstock.gateway.openai.splice import CallSplice, LogprobSplice, StreamSplice
from penstock.gateway.service.large_answers import decode_json, is_large
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view.frames import ChunkFrame, Frame, RestartedFrame, ResultFrame, SnapshotFrame, StatusFrame
from penstock.gateway.view.hub import Hub
from penstock.schemas.errors import InternalError, StreamRestarted
from penstock.schemas.records import InferenceRequest

RESTARTED = RestartedFrame(request_id="r1", attempt=2, cursor="c")
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def writer(*, chat: bool = True) -> ChunkWriter:
    return ChunkWriter("r1", 1, "m", chat=chat, includes_usage=False, tier=None)


def chunk(text: str, offset: int, **fields: Any) -> ChunkFrame:
    return ChunkFrame(request_id="r1", text=text, offset=offset, cursor="c", **fields)


def result(text: str, status: str = "completed", **fields: Any) -> ResultFrame:
    """`fields` are those of the result."""
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    found: dict[str, Any] = {"text": text, "finish_reason": "stop", "usage": usage, **fields}
    return ResultFrame(request_id="r1", status=status, result=found, error=None, cursor="c")


@asynccontextmanager
async def followed(*frames: Frame, gap_s: float | None = None) -> AsyncGenerator[Subscription]:
    """A subscription that gets these frames, all at once or one by one, and is closed after them."""
    subscription = Subscription(Hub(), single=True)

    async def publish() -> None:
        for frame in frames:
            await asyncio.sleep(gap_s or 0)
            subscription.push([frame])
        subscription.close()

    if gap_s is None:
        subscription.push(frames)
        subscription.close()
        yield subscription
        return
    publishing = asyncio.create_task(publish())
    try:
        yield subscription
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)


async def events_of(*frames: Frame, gap_s: float | None = None, chat: bool = True, **options: Any) -> list[bytes]:
    async with followed(*frames, gap_s=gap_s) as subscription:
        return [event async for event in stream_events(subscription, writer(chat=chat), **options)]


async def choices_of(*frames: Frame, **options: Any) -> list[dict[str, Any]]:
    text = b"".join(await events_of(*frames, **options)).decode()
    data = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")]
    return [choice for one in data for choice in json.loads(one)["choices"]]


# -- text

SEQUENCE = (
    chunk("ab", 0),
    RESTARTED,
    chunk("abc", 0),
    SnapshotFrame(request_id="r1", text="abcd", cursor="c"),
    chunk("e", 4),
    result("abcdef"),
)


async def test_frames_become_one_text() -> None:
    chat = [one["delta"].get("content", "|") for one in await choices_of(*SEQUENCE)]
    assert chat == ["", "ab", "c", "d", "e", "f", "|"]
    assert [one["text"] for one in await choices_of(*SEQUENCE, chat=False)] == ["ab", "c", "d", "e", "f", ""]


async def test_log_probabilities_come_with_their_text_and_the_rest_with_the_outcome() -> None:
    made = [{"token": letter, "logprob": -0.5, "bytes": None, "top_logprobs": None} for letter in "abcd"]

    def scored(text: str, offset: int, count: int) -> ChunkFrame:
        return chunk(text, offset, logprobs=made[offset : offset + count], logprobs_offset=offset)

    frames = (scored("a", 0, 1), scored("", 1, 1), RESTARTED, scored("ab", 0, 2), result("abc", logprobs=made))
    sent: list[tuple[str, str]] = []
    for choice in await choices_of(*frames):
        if choice["logprobs"] is not None:
            tokens = choice["logprobs"]["content"]
            assert {(one["logprob"], str(one["top_logprobs"])) for one in tokens} == {(-0.5, "[]")}
            sent.append((choice["delta"]["content"], "".join(one["token"] for one in tokens)))
    assert sent == [("a", "a"), ("", "b"), ("c", "cd")]


async def test_nothing_is_sent_after_a_contradiction() -> None:
    async with followed(chunk("ab", 0), RESTARTED, chunk("xy", 0), result("xy")) as subscription:
        events = stream_events(subscription, writer())
        assert b'"ab"' in await anext(events)
        with pytest.raises(StreamRestarted):
            await anext(events)


@pytest.mark.parametrize(
    ("frame", "error"), [(result("", "expired"), FinalFailure), (chunk("ab", 0), InternalError)], ids=["expired", "cut"]
)
async def test_every_other_end_is_a_failure(frame: Frame, error: type[Exception]) -> None:
    with pytest.raises(error):
        await events_of(frame)


async def test_a_large_output_is_fetched_and_completes_the_stream() -> None:
    whole, large = AsyncMock(side_effect=lambda found: {**found, "text": "abcd"}), result("")
    large.result = {"artifact": {"artifact_id": "a"}, "finish_reason": "stop", "usage": None}
    text = b"".join(await events_of(chunk("ab", 0), large, whole=whole))
    assert text.count(b'"content":"ab"') == text.count(b'"content":"cd"') == 1


# -- calls


async def test_calls_are_sent_in_pieces_and_completed_by_the_outcome() -> None:
    begun = {"index": 0, "id": "c", "name": "f", "arguments": "", "offset": 0}
    more = {"index": 0, "id": None, "name": None, "arguments": '{"a"', "offset": 0}
    calls = [
        {**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}},
        {**CALL, "id": "d", "function": {"name": "g", "arguments": "{}"}},
    ]
    ended = result("", tool_calls=calls, finish_reason="tool_calls")
    choices = await choices_of(chunk("", 0, tool_calls=[begun, more]), ended)
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert [one for choice in choices for one in choice["delta"].get("tool_calls", ())] == [
        {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "d", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]


async def test_further_choices_have_whole_calls() -> None:
    first = {"index": 0, "text": "a", "finish_reason": "stop"}
    other = {"index": 1, "text": "", "tool_calls": [CALL], "finish_reason": "tool_calls"}
    choices = await choices_of(result("a", choices=[first, other]))
    with_calls = [choice for choice in choices if "tool_calls" in choice["delta"]]
    assert [choice["delta"]["tool_calls"][0]["index"] for choice in with_calls] == [0, 0]
    assert {choice["index"] for choice in with_calls} == {1}


def test_what_is_there_only_if_there_is_some() -> None:
    piece = {"index": 0, "id": None, "name": None, "arguments": "x", "offset": 3}
    shown = chunk("", 0, tool_calls=[piece]).to_json()
    assert shown["tool_calls"] == [{"index": 0, "arguments": "x", "offset": 3}]
    assert "tool_calls" not in chunk("a", 0).to_json()
    usage = text_usage({"usage": {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 8}})
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    assert "prompt_tokens_details" not in text_usage({"usage": {"prompt_tokens": 9}})


# -- comments, and clients that leave


async def test_a_comment_is_sent_while_nothing_comes_and_no_frame_is_lost() -> None:
    events = await events_of(chunk("a", 0), result("ab"), gap_s=0.05, keepalive_s=0.01)
    assert events[0] == b": waiting\n\n"
    assert any(event.startswith(b":") for event in events[1:])
    text = b"".join(events)
    assert text.count(b'"content":"a"') == text.count(b'"content":"b"') == 1
    assert text.endswith(b"data: [DONE]\n\n")


async def test_frames_without_an_event_do_not_stop_the_comments() -> None:
    """A queued request whose position changes has news all the time, and none of it is an event of OpenAI's."""
    positions = [
        StatusFrame(request_id="r1", cursor="c", status="queued", done=False, position=position)
        for position in range(9, 1, -1)
    ]
    events = await events_of(*positions, result("ab"), gap_s=0.02, keepalive_s=0.05)
    assert events[0] == b": waiting\n\n"
    assert events.count(b": waiting\n\n") >= 2
    assert events[-1].endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_is_closed_early_leaves_no_task() -> None:
    async with followed(chunk("", 0), gap_s=60) as subscription:
        before = asyncio.all_tasks()
        events = stream_events(subscription, writer(), keepalive_s=0.001)
        assert await anext(events) == b": waiting\n\n"
        await events.aclose()
        assert asyncio.all_tasks() == before


async def test_a_burst_does_not_make_a_reading_client_slow() -> None:
    hub = Hub(client_frames=1_024)
    subscription = Subscription(hub, single=True)
    hub.subscribe(subscription.client, "s")

    async def read() -> bytes:
        return b"".join([event async for event in stream_events(subscription, writer())])

    reading = asyncio.create_task(read())
    for number in range(3_000):
        hub.publish("s", chunk("x", number))
        if number % 100 == 99:
            await asyncio.sleep(0)
    hub.publish("s", result("x" * 3_000))
    text = await asyncio.wait_for(reading, 60)
    assert text.count(b'"content":"x"') == 3_000
    assert hub.dropped_slow == 0


async def test_a_server_that_stops_cancels_no_request() -> None:
    """Only a client that leaves does: a restart of the gateway must not end accepted requests."""
    calls: list[str] = []

    async def send(message: Message) -> None:
        calls.append(message["type"])

    async def events() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        await asyncio.Event().wait()

    stream = AnswerStream(
        events(),  # type: ignore[arg-type]
        "r1",
        failure=writer().failure,
        abandoned=lambda: calls.append("abandoned"),
        close=lambda: calls.append("closed"),
    )
    task = asyncio.create_task(stream({"type": "http", "path": "/"}, no_body, send))
    while "http.response.body" not in calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == ["http.response.start", "http.response.body", "closed"]


# -- large answers of the OpenAI routes


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)
LOGPROBS = [{"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2.0}] * 20} for _ in range(200)]
VECTORS = [[0.5] * 1_024] * 4


@given(VALUES, st.sampled_from([None, 1]), st.sampled_from([None, (",", ":"), (" , ", "\t:\r\n")]))
def test_decoding_gives_what_json_gives(value: Any, indent: int | None, separators: Any) -> None:
    assert decode_json(json.dumps(value, indent=indent, separators=separators)) == value


@pytest.mark.parametrize("output", [{"embeddings": [[0.5] * 1_000] * 500}, {"logprobs": LOGPROBS * 20}])
def test_other_threads_have_their_turns_while_one_decodes(output: Json) -> None:
    text = json.dumps(output)
    turns, done, interval = 0, False, sys.getswitchinterval()

    def count() -> None:
        nonlocal turns
        while not done:
            turns += 1
            time.sleep(0)

    sys.setswitchinterval(0.0001)
    gc.disable()  # collections, of which Hypothesis is told, give turns too
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = turns
        decode_json(text)
        had = turns - before
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
        done = True
        thread.join()
    assert had > 20


@pytest.mark.parametrize(
    ("result", "large"),
    [
        ({"text": "a"}, False),
        ({"embeddings": [[0.5] * 384]}, False),
        ({"embeddings": VECTORS}, True),
        ({"artifact": {}}, True),
        ({"text": "a", "logprobs": LOGPROBS[:5]}, False),
        ({"text": "a", "choices": [{"index": 0, "logprobs": LOGPROBS}]}, True),
    ],
)
def test_what_counts_as_large(result: Json, *, large: bool) -> None:
    assert is_large(result) is large


def subscribed(result: Json) -> Subscription:
    return subscribed_to(ResultFrame(request_id="r1", cursor="c", status="completed", result=result, error=None))


def exchange_of(result: Json, stored: Json, answer: Callable[[Any, Any, Json], Json]) -> Exchange:
    part = Mock(**{"await_outcome.side_effect": lambda *_, **__: subscribed(result)})  # type: ignore[reportUnknownLambdaType]
    store = Mock(**{"get.return_value": json.dumps(stored).encode()})
    asked = InferenceRequest(request_id="r1", task="embedding", tenant="default", created_at=1)
    request = Request({"type": "http"}, no_body)
    return Exchange(request, service_with(part, artifacts=store), asked, "m", replace(EMBEDDING, answer=answer))


ARTIFACT = {"artifact": {"artifact_id": "a", "sha256": "s"}, "finish_reason": None, "usage": None}


@pytest.mark.parametrize(
    ("result", "thread"),
    [(ARTIFACT, "large-outputs"), ({"embeddings": VECTORS}, "large-outputs"), ({"embeddings": [[0.5]]}, "MainThread")],
)
async def test_a_large_answer_is_shaped_on_a_thread(result: Json, thread: str) -> None:
    threads: list[str] = []

    def shape(body: EmbeddingBody, made: Made, told: Json) -> Json:
        threads.append(threading.current_thread().name)
        return {"vectors": told["embeddings"]}

    body = EmbeddingBody(model="m", input="text")
    answer = await exchange_of(result, {"embeddings": VECTORS}, shape).answer(body)
    assert json.loads(bytes(answer.body)) == {"vectors": result.get("embeddings", VECTORS)}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "r1"
    (name,) = threads
    assert name.startswith(thread)


class WatchedWriter(ChunkWriter):
    thread = ""

    def ending(self, result: Json) -> list[Json]:
        self.thread = threading.current_thread().name
        return super().ending(result)


@pytest.mark.parametrize(
    ("logprobs", "thread"), [(LOGPROBS, "large-outputs"), (LOGPROBS[:2], "MainThread")], ids=["large", "small"]
)
async def test_the_end_of_a_stream_is_made_on_a_thread_when_it_is_large(logprobs: list[Json], thread: str) -> None:
    writer = WatchedWriter("r1", 1, "m", chat=True, includes_usage=False, tier=None)
    subscription = subscribed({"text": "ab", "logprobs": logprobs})
    text = b"".join([event async for event in stream_events(subscription, writer)])
    assert text.count(b'"token":"a"') == len(logprobs)
    assert text.endswith(b"data: [DONE]\n\n")
    assert writer.thread.startswith(thread)


# -- the splice: over any attempts and chunks the sent text is a prefix of one answer, or an error


TEXT = st.text(alphabet="abé🙂", max_size=20)


def cut(data: st.DataObject, text: str, *, is_whole: bool = True) -> list[tuple[int, str]]:
    """The text as chunks in sequence, some of them reaching back over what came before. Else some are missing."""
    chunks: list[tuple[int, str]] = []
    position = 0
    while position < len(text):
        end = data.draw(st.integers(position + 1, len(text)))
        start = data.draw(st.integers(0, position))
        if is_whole or data.draw(st.booleans()):
            chunks.append((start, text[start:end]))
        position = end
    return chunks


@given(st.data(), TEXT, st.lists(st.integers(0, 20), max_size=4), st.booleans())
def test_attempts_that_agree_are_one_text(data: st.DataObject, text: str, deaths: list[int], is_whole: bool) -> None:
    """Text behind a gap waits for the outcome."""
    splice, sent = StreamSplice(), ""
    for length in [*deaths, len(text)]:
        splice.restart()
        for offset, part in cut(data, text[:length], is_whole=is_whole):
            sent += splice.chunk(part, offset)
            assert text.startswith(sent)
    assert splice.sent == sent
    assert sent == text or not is_whole
    assert sent + splice.finish(text) == text


@given(st.data(), TEXT, TEXT)
def test_another_text_is_a_restart_or_extends_what_was_sent(data: st.DataObject, first: str, second: str) -> None:
    splice = StreamSplice()
    for offset, part in cut(data, first):
        splice.chunk(part, offset)
    splice.restart()
    agrees = second.startswith(first)
    try:
        for offset, part in cut(data, second):
            splice.chunk(part, offset)
            assert splice.sent in (first, second) or second.startswith(splice.sent) or first.startswith(second)
        splice.finish(second)
    except StreamRestarted:
        assert not agrees
        assert splice.sent == first, "nothing may be sent after a contradiction"
    else:
        assert agrees
        assert splice.sent == second


def test_a_snapshot_stands_for_the_text_so_far() -> None:
    splice = StreamSplice()
    splice.chunk("ab", 0)
    assert splice.snapshot("abcd") == "cd"
    assert splice.chunk("de", 3) == "e"
    with pytest.raises(StreamRestarted):
        splice.snapshot("xbcd")


def tokens(text: str) -> list[dict[str, Any]]:
    return [{"token": letter, "logprob": -1.0} for letter in text]


@given(st.data(), st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["abcdefgh", "abcdxfgh"]))
def test_log_probabilities_are_sent_once_and_for_the_same_tokens(
    data: st.DataObject, deaths: list[int], last: str
) -> None:
    splice, told = LogprobSplice(), ""
    for count in deaths:
        for offset, part in cut(data, "abcdefgh", is_whole=False)[:count]:
            told += "".join(one["token"] for one in splice.pieces(tokens(part), offset))
        splice.restart()
    assert "abcdefgh".startswith(told)
    try:
        for offset, part in cut(data, last, is_whole=False)[: data.draw(st.integers(0, 9))]:
            told += "".join(one["token"] for one in splice.pieces(tokens(part), offset))
        told += "".join(one["token"] for one in splice.finish(tokens(last)))
    except StreamRestarted:
        assert not last.startswith(told)
    else:
        assert told == last


def test_log_probabilities_after_a_gap_come_with_the_outcome() -> None:
    splice = LogprobSplice()
    assert len(splice.pieces(tokens("ab"), 0)) == 2
    assert splice.pieces(tokens("e"), 4) == []
    assert splice.finish(tokens("abcde")) == tokens("cde")


CALLS: list[dict[str, Any]] = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é🙂"}'}},
    {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


def call_pieces(data: st.DataObject) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    for index, call in enumerate(CALLS):
        function = call["function"]
        pieces.append({"index": index, "id": call["id"], "name": function["name"], "arguments": "", "offset": 0})
        for offset, part in cut(data, function["arguments"]):
            pieces.append({"index": index, "id": None, "name": None, "arguments": part, "offset": offset})
    return pieces


@given(st.data(), st.lists(st.integers(0, 12), max_size=3))
def test_calls_are_sent_once_over_attempts_that_agree(data: st.DataObject, deaths: list[int]) -> None:
    splice, told = CallSplice(), list[dict[str, Any]]()
    for count in deaths:
        told += splice.pieces(call_pieces(data)[:count])
        splice.restart()
    told += splice.pieces(call_pieces(data)[: data.draw(st.integers(0, 12))])
    told += splice.finish(CALLS)
    arguments = ["", ""]
    for one in told:
        assert one["offset"] == len(arguments[one["index"]])
        arguments[one["index"]] += one["arguments"]
    assert arguments == [call["function"]["arguments"] for call in CALLS]
    assert [one["id"] for one in told if one["id"]] == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [[], [{**CALLS[0], "id": "z"}], [{**CALLS[0], "function": {"name": "f", "arguments": "[]"}}]],
    ids=["none", "another", "other arguments"],
)
def test_other_calls_than_were_sent_are_a_restart(other: list[dict[str, Any]]) -> None:
    splice = CallSplice()
    splice.pieces([{"index": 0, "id": "a", "name": "f", "arguments": '{"x"', "offset": 0}])
    with pytest.raises(StreamRestarted):
        splice.finish(other)
