"""Runs on an engine: a sink that keeps what it gets, and servers for remote engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from penstock.processors.engines.base import Delta, Finished, Progress, RunFailed, RunSpec
from penstock.processors.engines.remote.engine import RemoteEngine

Handler = Callable[[httpx.Request], Any]


class Sink:
    """Keeps the deltas, the steps and the outcome of a run. A second outcome raises."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.steps: list[tuple[int, int]] = []
        self.done: asyncio.Future[Finished | RunFailed] = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def on_progress(self, progress: Progress) -> None:
        self.steps.append((progress.step, progress.steps))

    def on_finished(self, finished: Finished) -> None:
        self.done.set_result(finished)

    def on_failed(self, failed: RunFailed) -> None:
        self.done.set_result(failed)

    @property
    def texts(self) -> list[str]:
        return [delta.text for delta in self.deltas]


async def start(engine: Any, asked: RunSpec) -> Sink:
    sink = Sink()
    engine.run(asked, await engine.prepare(asked), sink)
    return sink


async def run(engine: Any, asked: RunSpec) -> tuple[Sink, Any]:
    """The sink and its outcome: `Finished` or `RunFailed`."""
    sink = await start(engine, asked)
    return sink, await asyncio.wait_for(sink.done, 10)


class Server:
    """Answers each request alike, or as a function says, and keeps the requests."""

    def __init__(self, answer: httpx.Response | Handler) -> None:
        self.answer = answer
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> Any:
        self.requests.append(request)
        return self.answer if isinstance(self.answer, httpx.Response) else self.answer(request)

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(request.content) for request in self.requests]


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[RemoteEngine]:
    """A remote engine whose server is this handler."""
    engine = RemoteEngine("m", "http://server", options, transport=httpx.MockTransport(handler))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def served(handler: Handler, asked: RunSpec, **options: Any) -> tuple[Sink, Any]:
    """One run on a server of its own: its sink and its outcome."""
    async with serving(handler, **options) as engine:
        return await run(engine, asked)


def sse(*events: dict[str, Any] | str) -> httpx.Response:
    lines = [event if isinstance(event, str) else f"data: {json.dumps(event)}\n\n" for event in events]
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, text="".join(lines))
