"""Fan-out: one stream to many WebSocket clients, against a bare uvicorn broadcast of the same frames."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
from common import Row, broker, interleave, percentile, save, system
from websockets.asyncio.client import connect

from system import eventually, free_port

TOKENS = 60
STREAM = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": TOKENS, "delay_ms": 40, "first_delay_ms": 1500, "slots": 8},
}

BARE = """
import asyncio, json, sys
import uvicorn
from fastapi import FastAPI, WebSocket
app, sockets, TOKENS = FastAPI(), set(), int(sys.argv[2])
@app.websocket("/ws")
async def ws(socket: WebSocket):
    await socket.accept(); sockets.add(socket)
    try:
        while True: await socket.receive_text()
    except Exception: sockets.discard(socket)
@app.post("/go")
async def go():
    await asyncio.sleep(0.5)
    for n in range(TOKENS):
        frame = json.dumps({"type": "chunk", "request_id": "r" * 36, "text": "word ", "offset": n, "cursor": "c" * 40})
        await asyncio.gather(*(socket.send_text(frame) for socket in list(sockets)))
        await asyncio.sleep(0.04)
    frame = json.dumps({"type": "result"})
    await asyncio.gather(*(socket.send_text(frame) for socket in list(sockets)))
    return {}
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", loop="uvloop", http="httptools", ws="websockets-sansio",
            ws_per_message_deflate=False)
"""


async def watch(url: str, clients: int, hello: Callable[[], str | None], go: Callable[[], Any]) -> dict[str, float]:
    """Spread of each frame's arrival (the last client's minus the first one's, ms); what all got together, frames/s."""
    arrivals: dict[int, list[float]] = {}

    async def one(ready: asyncio.Semaphore) -> None:
        async with connect(url, compression=None, open_timeout=60) as socket:
            if (text := hello()) is not None:
                await socket.send(text)
            ready.release()
            async for text in socket:
                frame = json.loads(text)
                if frame["type"] == "chunk":
                    arrivals.setdefault(frame["offset"], []).append(time.perf_counter())
                elif frame["type"] == "result":
                    return

    ready = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(one(ready)) for _ in range(clients)]
    for _ in range(clients):
        await ready.acquire()
    trigger = asyncio.create_task(go())
    await asyncio.gather(*tasks)
    await trigger
    spreads = [1000 * (max(times) - min(times)) for times in arrivals.values() if len(times) == clients]
    assert spreads, "no frame reached every client"
    every = [at for times in arrivals.values() for at in times]
    rate = len(every) / (max(every) - min(every))
    return {"p50": percentile(spreads, 0.5), "p99": percentile(spreads, 0.99), "rate": rate}


def main(rounds: int = 3) -> None:
    rows: list[Row] = []
    with broker() as bootstrap, system(bootstrap, models=[STREAM]) as found:
        worker, gateway = found.worker(), found.gateway()
        worker.wait_ready()
        gateway.wait_ready()
        port = free_port()
        bare = subprocess.Popen([sys.executable, "-c", BARE, str(port), str(TOKENS)])
        eventually(
            lambda: httpx.get(f"http://127.0.0.1:{port}/x").status_code == 404 if alive(port) else False,
            30,
            lambda: "the bare broadcast did not start",
        )
        for clients in (100, 500):

            async def ours(clients: int = clients) -> dict[str, float]:
                body = {"task": "text_generation", "stream": True, "payload": {"prompt": "go", "max_tokens": TOKENS}}
                async with httpx.AsyncClient(timeout=30) as http:
                    accepted = (await http.post(gateway.url + "/v1/requests", json=body)).json()
                subscribe = json.dumps({"type": "subscribe", "request_id": accepted["request_id"]})
                url = gateway.url.replace("http", "ws") + "/v1/ws"
                return await watch(url, clients, lambda: subscribe, nothing)

            async def floor(clients: int = clients) -> dict[str, float]:
                async def go() -> None:
                    async with httpx.AsyncClient(timeout=120) as http:
                        await http.post(f"http://127.0.0.1:{port}/go")

                return await watch(f"ws://127.0.0.1:{port}/ws", clients, lambda: None, go)

            got, floors, steals = interleave(rounds, lambda f=ours: asyncio.run(f()), lambda f=floor: asyncio.run(f()))
            rows.append(Row(f"fan-out to {clients} sockets", "frames/s", got["rate"], floors["rate"], steals, "≥ 0.8"))
            for name in ("p50", "p99"):
                rows.append(
                    Row(
                        f"fan-out to {clients} sockets: first to last client, {name}",
                        "ms",
                        got[name],
                        floors[name],
                        steals,
                        "reported",
                    )
                )
        bare.kill()
        bare.wait()
    save("fanout", rows)


async def nothing() -> None:
    return None


def alive(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/x")
    except httpx.HTTPError:
        return False
    return True


if __name__ == "__main__":
    main()
