"""Running an OpenAI exchange: comments while nothing comes, frames to events, nothing left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Message

from penstock.gateway.edge.errors import FinalFailure
from penstock.gateway.openai.chat_answers import ChunkWriter, Json, text_usage
from penstock.gateway.openai.exchange import AnswerStream, ClientGone, stream_events, unless_gone
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view.frames import ChunkFrame, Frame, RestartedFrame, ResultFrame, SnapshotFrame, StatusFrame
from penstock.gateway.view.hub import Hub
from penstock.schemas.errors import InternalError, StreamRestarted


def writer(*, chat: bool = True, includes_usage: bool = False) -> ChunkWriter:
    return ChunkWriter("r1", 1, "m", chat=chat, includes_usage=includes_usage, tier=None)


def chunk(text: str, offset: int) -> ChunkFrame:
    return ChunkFrame(request_id="r1", text=text, offset=offset, cursor="c")


def result(text: str, status: str = "completed") -> ResultFrame:
    found: dict[str, Any] = {
        "text": text,
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
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


async def events_of(*frames: Frame, gap_s: float | None = None, **options: Any) -> list[bytes]:
    async with followed(*frames, gap_s=gap_s) as subscription:
        return [event async for event in stream_events(subscription, writer(), **options)]


async def texts(*frames: Frame, chat: bool = True) -> list[str]:
    found: list[str] = []
    async with followed(*frames) as subscription:
        async for event in stream_events(subscription, writer(chat=chat)):
            for line in event.decode().split("\n\n"):
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    found.append(choice["delta"].get("content", "|") if chat else choice["text"])
    return found


async def test_frames_become_one_text() -> None:
    restarted = RestartedFrame(request_id="r1", attempt=2, cursor="c")
    snapshot = SnapshotFrame(request_id="r1", text="abcd", cursor="c")
    sequence = (chunk("ab", 0), restarted, chunk("abc", 0), snapshot, chunk("e", 4), result("abcdef"))
    assert await texts(*sequence) == ["", "ab", "c", "d", "e", "f", "|"]
    assert await texts(*sequence, chat=False) == ["ab", "c", "d", "e", "f", ""]


async def test_log_probabilities_come_with_their_text_and_the_rest_with_the_outcome() -> None:
    made = [{"token": letter, "logprob": -0.5, "bytes": None, "top_logprobs": None} for letter in "abcd"]

    def scored(text: str, offset: int, count: int) -> ChunkFrame:
        told = made[offset : offset + count]
        return ChunkFrame(request_id="r1", text=text, offset=offset, cursor="c", logprobs=told, logprobs_offset=offset)

    ended = result("abc")
    assert ended.result is not None
    ended.result["logprobs"] = made
    restarted = RestartedFrame(request_id="r1", attempt=2, cursor="c")
    events = await events_of(scored("a", 0, 1), scored("", 1, 1), restarted, scored("ab", 0, 2), ended)
    lines = [line for event in events for line in event.decode().split("\n\n") if line.startswith("data: {")]
    told: list[tuple[str, str]] = []
    for line in lines:
        (choice,) = json.loads(line[6:])["choices"]
        if choice["logprobs"] is not None:
            tokens = choice["logprobs"]["content"]
            assert {one["logprob"] for one in tokens} == {-0.5}
            assert [one["top_logprobs"] for one in tokens] == [[]] * len(tokens)
            told.append((choice["delta"]["content"], "".join(one["token"] for one in tokens)))
    assert told == [("a", "a"), ("", "b"), ("c", "cd")]


async def test_nothing_is_sent_after_a_contradiction() -> None:
    restarted = RestartedFrame(request_id="r1", attempt=2, cursor="c")
    async with followed(chunk("ab", 0), restarted, chunk("xy", 0), result("xy")) as subscription:
        events = stream_events(subscription, writer())
        assert b'"ab"' in await anext(events)
        with pytest.raises(StreamRestarted):
            await anext(events)


async def test_every_other_outcome_is_a_failure() -> None:
    with pytest.raises(FinalFailure):
        await texts(result("", "expired"))
    with pytest.raises(InternalError):
        await texts(chunk("ab", 0))


async def test_a_comment_is_sent_while_nothing_comes_and_no_frame_is_lost() -> None:
    events = await events_of(chunk("a", 0), result("ab"), gap_s=0.05, keepalive_s=0.01)
    assert events[0] == b": waiting\n\n"
    assert any(event.startswith(b":") for event in events[1:])
    text = b"".join(events)
    assert text.count(b'"content":"a"') == text.count(b'"content":"b"') == 1
    assert text.endswith(b"data: [DONE]\n\n")


async def test_leaving_early_leaves_nothing_waiting() -> None:
    async with followed(chunk("", 0), gap_s=60) as subscription:
        before = asyncio.all_tasks()
        events = stream_events(subscription, writer(), keepalive_s=0.001)
        assert await anext(events) == b": waiting\n\n"
        await events.aclose()
        assert asyncio.all_tasks() == before


async def test_a_burst_does_not_make_a_reading_client_slow() -> None:
    """The follower gives many records a turn: one frame a turn fell behind until the client was let go as slow."""
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
    text = await asyncio.wait_for(reading, 10)
    assert text.count(b'"content":"x"') == 3_000
    assert hub.dropped_slow == 0


async def test_work_is_stopped_when_the_client_goes() -> None:
    gone = asyncio.Event()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work() -> str:
        return "done"

    assert await unless_gone(receive, work()) == "done"
    gone.set()
    with pytest.raises(ClientGone):
        await unless_gone(receive, asyncio.sleep(60))


async def test_a_server_that_stops_cancels_no_work() -> None:
    """Only the client's going does: a restart of the gateway must not end what was accepted."""
    calls: list[str] = []

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

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
    task = asyncio.create_task(stream({"type": "http", "path": "/"}, receive, send))
    while "http.response.body" not in calls:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls == ["http.response.start", "http.response.body", "closed"]


async def test_frames_that_say_nothing_here_do_not_silence_the_comments() -> None:
    """A queued request whose position moves has news all the time, and none of it is an event of OpenAI's."""
    waiting = [
        StatusFrame(request_id="r1", cursor="c", status="queued", done=False, position=9 - number)
        for number in range(8)
    ]
    events = await events_of(*waiting, result("ab"), gap_s=0.02, keepalive_s=0.05)
    assert events[0] == b": waiting\n\n"
    assert events.count(b": waiting\n\n") >= 2
    assert events[-1].endswith(b"data: [DONE]\n\n")


async def test_a_large_output_is_fetched_and_completes_the_stream() -> None:
    async def whole(found: Json) -> Json:
        return {**found, "text": "abcd"}

    large = result("")
    large.result = {"artifact": {"artifact_id": "a"}, "finish_reason": "stop", "usage": None}
    text = b"".join(await events_of(chunk("ab", 0), large, whole=whole))
    assert text.count(b'"content":"ab"') == text.count(b'"content":"cd"') == 1


def deltas_of(events: list[bytes]) -> list[dict[str, Any]]:
    data = [line[6:] for event in events for line in event.decode().split("\n\n") if line.startswith("data: {")]
    return [choice for one in data for choice in json.loads(one)["choices"]]


async def test_calls_come_in_pieces_and_what_no_frame_brought_with_the_outcome() -> None:
    begun = {"index": 0, "id": "c", "name": "f", "arguments": "", "offset": 0}
    more = {"index": 0, "id": None, "name": None, "arguments": '{"a"', "offset": 0}
    told = ChunkFrame(request_id="r1", text="", offset=0, tool_calls=[begun, more], cursor="c")
    other = {"id": "d", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}, other]
    ended = result("")
    ended.result = {**(ended.result or {}), "tool_calls": calls, "finish_reason": "tool_calls"}
    choices = deltas_of(await events_of(told, ended))
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert [one for choice in choices for one in choice["delta"].get("tool_calls", ())] == [
        {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "d", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"index": 1, "function": {"arguments": "{}"}},
    ]


def test_a_frame_shows_pieces_of_calls_only_where_there_are_some() -> None:
    piece = {"index": 0, "id": None, "name": None, "arguments": "x", "offset": 3}
    frame = ChunkFrame(request_id="r1", text="", offset=0, tool_calls=[piece], cursor="c")
    assert frame.to_json()["tool_calls"] == [{"index": 0, "arguments": "x", "offset": 3}]
    assert "tool_calls" not in chunk("a", 0).to_json()


async def test_further_answers_bring_their_calls_whole() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ended = result("a")
    other = {"index": 1, "text": "", "tool_calls": [call], "finish_reason": "tool_calls"}
    ended.result = {**(ended.result or {}), "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}, other]}
    choices = deltas_of(await events_of(ended))
    assert [choice["delta"]["tool_calls"][0]["index"] for choice in choices if "tool_calls" in choice["delta"]] == [
        0,
        0,
    ]
    assert all(choice["index"] == 1 for choice in choices if "tool_calls" in choice["delta"])


def test_reused_tokens_stand_in_the_usage() -> None:
    told = text_usage({"usage": {"prompt_tokens": 9, "completion_tokens": 1, "cached_tokens": 8}})
    assert told["prompt_tokens_details"] == {"cached_tokens": 8}
    assert "prompt_tokens_details" not in text_usage({"usage": {"prompt_tokens": 9}})
