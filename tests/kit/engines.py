"""Runs on an engine: a sink that keeps what it gets, and servers for remote engines."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from penstock.processors.engines.base import Delta, Finished, RunFailed, RunSpec, StepProgress
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

    def on_progress(self, progress: StepProgress) -> None:
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


class Resolver(AbstractResolver):
    """Every name is this machine, and every port the server's."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host="127.0.0.1", port=self._port, family=socket.AF_INET, proto=0, flags=0)
        ]

    async def close(self) -> None:
        pass


@asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[Resolver]:
    """A real server of HTTP that answers as the handler says, or breaks off where it raises."""

    async def answer(call: web.BaseRequest) -> web.StreamResponse:
        try:
            url = f"http://server{call.path_qs}"
            connection = {"connection": id(call.transport)}
            content = await call.read()
            request = httpx.Request(
                call.method, url, headers=dict(call.headers), content=content, extensions=connection
            )
            found = handler(request)
            response: httpx.Response = await found if inspect.isawaitable(found) else found
            headers = {name: value for name, value in response.headers.items() if name != "transfer-encoding"}
            sent = web.StreamResponse(status=response.status_code, headers=headers)
            await sent.prepare(call)
            assert isinstance(response.stream, httpx.AsyncByteStream)
            try:
                async for piece in response.stream:
                    await sent.write(piece)
            finally:
                await response.stream.aclose()
            await sent.write_eof()
        except Exception:
            assert call.transport is not None
            call.transport.abort()
            raise
        return sent

    runner = web.ServerRunner(web.Server(answer, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1).start()
    try:
        yield Resolver(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[RemoteEngine]:
    """A remote engine whose server is this handler."""
    async with listening(handler) as resolver:
        engine = RemoteEngine("m", "http://server", options, resolver=resolver)
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
