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
from penstock.gateway.openai.chat_answers import ChunkWriter, Json
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
