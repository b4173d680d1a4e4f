"""A server that stops while a socket or a connection is being opened."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from penstock.cli.paths import free_port
from penstock.gateway.server import Server
from support import wait_until_async


class Serving:
    """A server of this app on a port of its own."""

    def __init__(self, app: Any, **options: Any) -> None:
        self.port = free_port()
        self.server = Server(
            uvicorn.Config(app, host="127.0.0.1", port=self.port, lifespan="off", log_level="error", **options)
        )

    async def __aenter__(self) -> Serving:
        self.serving = asyncio.create_task(self.server.serve())
        await wait_until_async(lambda: self.server.started, 10)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.serving, 20)

    async def begins_to_stop(self) -> None:
        self.server.should_exit = True
        await wait_until_async(lambda: not any(one.is_serving() for one in self.server.servers), 10)


@pytest.mark.parametrize("ws", ["websockets-sansio", "auto"])
async def test_a_socket_that_is_opened_at_the_stop_is_told_to_come_again(ws: Any) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked.set()
        await answer.wait()
        await send({"type": "websocket.accept"})
        await receive()

    async def opened(port: int) -> int | None:
        async with connect(f"ws://127.0.0.1:{port}") as client:
            with pytest.raises(ConnectionClosed):
                await client.recv()
            return client.close_code

    async with asyncio.timeout(30), Serving(app, ws=ws) as site:
        opening = asyncio.create_task(opened(site.port))
        await asked.wait()
        await site.begins_to_stop()
        answer.set()
        assert await opening == 1012


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_connection_that_was_just_made_is_answered_at_the_stop(http: Any) -> None:

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async with asyncio.timeout(30), Serving(app, http=http) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        await wait_until_async(lambda: bool(site.server.server_state.connections), 10)
        await site.begins_to_stop()
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"ok")
        writer.close()
