"""The remote engine's limit against a real HTTP server that serves so many at once and refuses the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.processors.engines.base import Delta, Finished, Limits, RunFailed, RunSpec, TurnedAway
from penstock.processors.engines.remote.engine import RemoteEngine

CAPACITY = 3
ANSWER = json.dumps({"choices": [{"index": 0, "message": {"content": "ok"}, "finish_reason": "stop"}]}).encode()


class Server:
    """Answers each request after a moment; 429 and 503 by turns beyond its capacity."""

    def __init__(self) -> None:
        self.busy = self.answered = self.refused = 0
        self.connections: set[asyncio.Task[None] | None] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(
                    int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
                )
                await reader.readexactly(length)
                writer.write(await self.answer())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self) -> bytes:
        if self.busy >= CAPACITY:
            self.refused += 1
            status = b"429 Too Many Requests" if self.refused % 2 else b"503 Service Unavailable"
            return b"HTTP/1.1 " + status + b"\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n"
        self.busy += 1
        await asyncio.sleep(0.05)
        self.busy -= 1
        self.answered += 1
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
        return head + ANSWER


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    async with listener:
        yield server, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        await asyncio.gather(*(task for task in server.connections if task is not None))


class Sender:
    """Stands for the flow: keeps as many runs under way as the engine's limits say, and sends again what came back."""

    def __init__(self, engine: RemoteEngine, count: int) -> None:
        self.engine, self.left = engine, count
        self.slots, self.under_way, self.number = engine.limits().slots, 0, 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failures: list[RunFailed] = []
        engine.on_limits = self.on_limits

    def on_limits(self, limits: Limits) -> None:
        self.slots = limits.slots

    async def fill(self) -> None:
        while self.under_way < min(self.slots, self.left):
            self.number += 1
            self.under_way += 1
            messages = [{"role": "user", "content": "Hi"}]
            spec = RunSpec(run_id=f"r{self.number}", task="text_generation", model="m", messages=messages)
            self.engine.run(spec, await self.engine.prepare(spec), self)

    def on_delta(self, delta: Delta) -> None: ...

    def on_finished(self, finished: Finished) -> None:
        self.left -= 1
        self.over()

    def on_failed(self, failed: RunFailed) -> None:
        if not isinstance(failed.error, TurnedAway):
            self.failures.append(failed)
            self.left -= 1
        self.over()

    def over(self) -> None:
        self.under_way -= 1
        if self.left == 0 and not self.done.done():
            self.done.set_result(None)


async def test_the_limit_finds_the_servers_capacity_and_every_request_is_answered() -> None:
    async with listening() as (server, url):
        engine = RemoteEngine("m", url, {"slots": 32})
        await engine.start()
        sender = Sender(engine, 120)
        async with asyncio.timeout(60):
            while not sender.done.done():
                await sender.fill()
                await asyncio.sleep(0.001)
        await engine.stop()
    assert sender.failures == []
    assert server.answered == 120
    assert CAPACITY - 2 <= engine.limits().slots <= CAPACITY + 2
    # With no limit but its slots there would be ten refusals to an answer. Most of these are of the first moment.
    assert server.refused < server.answered
