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


@pytest.mark.parametrize("ws", ["websockets-sansio", "auto"])
async def test_a_socket_that_is_opened_at_the_stop_is_told_to_come_again(ws: Any) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        asked.set()
        await answer.wait()
        await send({"type": "websocket.accept"})
        await receive()

    port = free_port()
    server = Server(uvicorn.Config(app, host="127.0.0.1", port=port, ws=ws, lifespan="off", log_level="error"))
    serving = asyncio.create_task(server.serve())
    await wait_until_async(lambda: server.started, 10)

    async def opened() -> int | None:
        async with connect(f"ws://127.0.0.1:{port}") as client:
            with pytest.raises(ConnectionClosed):
                await client.recv()
            return client.close_code

    opening = asyncio.create_task(opened())
    async with asyncio.timeout(20):
        await asked.wait()
        server.should_exit = True
        await wait_until_async(lambda: not any(one.is_serving() for one in server.servers), 10)
        answer.set()
        assert await opening == 1012
        await serving


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_connection_that_was_just_made_is_answered_at_the_stop(http: Any) -> None:

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    port = free_port()
    server = Server(uvicorn.Config(app, host="127.0.0.1", port=port, http=http, lifespan="off", log_level="error"))
    serving = asyncio.create_task(server.serve())
    await wait_until_async(lambda: server.started, 10)
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await wait_until_async(lambda: bool(server.server_state.connections), 10)
        server.should_exit = True
        await wait_until_async(lambda: not any(one.is_serving() for one in server.servers), 10)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"ok")
        writer.close()
        await serving
