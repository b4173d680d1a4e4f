"""Stands in for a vLLM server: a token each 20 ms and stream. `stream_server.py PORT`. The standard library alone."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress

EVERY_S = 0.02


def event(delta: dict[str, str], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    data = b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN, END = event({"content": " w"}), event({}, "length") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            tokens = int(json.loads(await reader.readexactly(size))["max_tokens"])
            writer.write(HEAD)
            began = loop.time()
            for number in range(tokens):
                await asyncio.sleep(began + (number + 1) * EVERY_S - loop.time())
                writer.write(TOKEN)
            writer.write(END)


async def main(port: str) -> None:
    async with await asyncio.start_server(serve, "127.0.0.1", int(port), backlog=512) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
