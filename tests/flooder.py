"""A tenant that floods every route and socket of a gateway, as a process: `python tests/flooder.py URL KEY SECONDS`.

Ends with a JSON object on stdout: answers by status code, and sockets' frames by type.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

CONNECTIONS, CHATS, SOCKETS = 64, 64, 24
CHAT = {"model": "text", "messages": [{"role": "user", "content": "hi"}]}
SUBMIT = {"task": "text_generation", "model": "text", "payload": {"prompt": "hi"}}


Call = tuple[str, str, bytes]


def chats(number: int) -> list[Call]:
    """(method, path, body) of what waits for an outcome, plain and streamed."""
    return [
        ("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": stream}).encode()) for stream in (False, True)
    ]


def calls(number: int) -> list[Call]:
    """The same of each other route in turn; `number` makes conversations differ."""
    submit = json.dumps({**SUBMIT, "conversation_id": f"flood{number}"} if number % 50 == 0 else SUBMIT).encode()
    return [
        ("POST", "/v1/requests", submit),
        ("GET", "/v1/requests?limit=100", b""),
        ("POST", "/v1/requests/cancel", b'{"status": "queued"}'),
        ("POST", "/v1/artifacts", b"x" * 10_000),
        ("POST", "/v1/tickets", b""),
        ("GET", "/v1/requests/00000000-0000-0000-0000-000000000000?wait=5", b""),
        ("GET", "/v1/conversations", b""),
        ("GET", "/v1/models", b""),
        ("GET", "/v1/stats", b""),
        ("GET", "/registry/subjects", b""),
        ("GET", "/metrics", b""),
    ]


async def flood_http(
    url: str, key: str, until: float, seen: Counter[str], number: int, kinds_of: Callable[[int], list[Call]]
) -> None:
    """One connection, one call after the other, never waiting as it is told to."""
    where = urlsplit(url)
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
        except OSError:
            await asyncio.sleep(0.05)
            continue
        try:
            while time.monotonic() < until:
                number += 1
                kinds = kinds_of(number)
                method, path, body = kinds[number % len(kinds)]
                head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
                head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                async with asyncio.timeout(5):
                    status = await read_answer(reader)
                seen[status] += 1
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            seen["broken"] += 1
        finally:
            writer.close()


async def read_answer(reader: asyncio.StreamReader) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"transfer-encoding: chunked" in head:
        await reader.readuntil(b"0\r\n\r\n")
    else:
        length = next((line.split(b":")[1] for line in head.split(b"\r\n") if line.startswith(b"content-length")), b"0")
        await reader.readexactly(int(length))
    return head[9:12].decode()


async def flood_socket(url: str, key: str, until: float, seen: Counter[str]) -> None:
    """One socket that submits and asks as fast as it is read."""
    address = url.replace("http", "ws") + "/v1/ws"
    while time.monotonic() < until:
        try:
            async with (
                asyncio.timeout(max(0.1, until - time.monotonic())),
                connect(
                    address, additional_headers={"x-api-key": key}, subprotocols=["penstock.v1"], compression=None
                ) as socket,
            ):
                reading = asyncio.create_task(read_frames(socket, seen))
                try:
                    while True:
                        await socket.send(json.dumps({"type": "submit", "request": SUBMIT}))
                        await socket.send('{"type": "ping"}')
                        await socket.send('{"type": "subscribe", "request_id": "nobody"}')
                        await asyncio.sleep(0.05)  # its own loop has other work: a send into buffers never pauses
                finally:
                    reading.cancel()
        except (OSError, TimeoutError, WebSocketException):
            seen["socket ended"] += 1
            await asyncio.sleep(0.02)


async def read_frames(socket: object, seen: Counter[str]) -> None:
    async for frame in socket:  # type: ignore[attr-defined]
        told = json.loads(frame)
        seen[told["type"] if told["type"] != "error" else told["error"]["code"]] += 1


async def main(url: str, key: str, seconds: float) -> None:
    os.nice(10)  # the machine is shared; what is tested is the gateway
    until, seen = time.monotonic() + seconds, Counter[str]()
    async with asyncio.TaskGroup() as group:
        for number in range(CONNECTIONS):
            group.create_task(flood_http(url, key, until, seen, number, calls))
        for number in range(CHATS):
            group.create_task(flood_http(url, key, until, seen, number, chats))
        for _ in range(SOCKETS):
            group.create_task(flood_socket(url, key, until, seen))
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
