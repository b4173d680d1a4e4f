"""No-op chats through the gateway, 64 at a time, beside LitServe (one worker, nothing durable) and plain FastAPI;
and what a chat costs each process that takes part.

All three are one uvicorn process with uvloop and httptools, and get the same client with the same body.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import psutil
from backlog import WARM, cpu_seconds, warm
from common import Figures, Row, broker, options, rotate, save, system
from overhead import BODY, NOOP
from peers import PeerMissing, environment

from system import eventually, free_port

LITSERVE = ("litserve==0.2.19",)
CLIENTS = 64
SERVERS = ("gateway", "worker")
PATH = "/v1/chat/completions"

PLAIN = """
import sys, uvicorn
from fastapi import FastAPI, Request
app = FastAPI()
@app.post("/v1/chat/completions")
async def echo(request: Request) -> dict: return await request.json()
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", loop="uvloop", http="httptools")
"""


async def closed_loop(url: str, seconds: float, clients: int = CLIENTS) -> Figures:
    """Each client sends its next request when it has its answer."""
    count, stop = 0, time.perf_counter() + seconds

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal count
        while time.perf_counter() < stop:
            async with session.post(url + PATH, json=BODY) as answer:
                body = await answer.read()
                assert answer.status == 200, body
            count += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(one(session) for _ in range(clients)))
        return {"rate": count / (time.perf_counter() - began)}


def broker_pid() -> int | None:
    """The process of the embedded broker, which is a child of this one; None when PENSTOCK_TEST_KAFKA names another."""
    return next((child.pid for child in psutil.Process().children() if "java" in child.name()), None)


def costs(url: str, seconds: float, gateway: int, worker: int) -> Figures:
    """The rate of chats, and the microseconds of processor that each costs every process."""
    processes = {"gateway": gateway, "worker": worker, "client": os.getpid()}
    if (kafka := broker_pid()) is not None:
        processes["Kafka"] = kafka

    def spent() -> Figures:
        whole = {name: cpu_seconds(pid) for name, pid in processes.items()}
        main = {f"{name}'s main thread": cpu_seconds(pid, pid) for name, pid in processes.items() if name in SERVERS}
        return whole | main | ({} if kafka is None else {"all processes": sum(whole.values())})

    before, began = spent(), time.perf_counter()
    rate = asyncio.run(closed_loop(url, seconds))["rate"]
    count = rate * (time.perf_counter() - began)
    return {"rate": rate} | {name: 1e6 * (after - before[name]) / count for name, after in spent().items()}


def serving(stack: ExitStack, command: list[str]) -> str:
    """Start a server on a free port until the stack ends; its URL."""
    port = free_port()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    null = subprocess.DEVNULL
    process = subprocess.Popen(
        [*command, str(port)], env=env, start_new_session=True, stdin=null, stdout=null, stderr=null
    )
    stack.callback(process.wait)
    stack.callback(os.killpg, process.pid, signal.SIGKILL)  # LitServe's own processes do not end with it
    url = f"http://127.0.0.1:{port}"

    def up() -> bool:
        try:
            asyncio.run(closed_loop(url, 0.01, 1))
        except aiohttp.ClientError:
            return False
        return True

    eventually(up, 60, lambda: f"{command} did not start")
    return url


def main() -> None:
    chosen = options(__doc__, rounds=5)
    seconds = 2 if chosen.quick else 6
    with ExitStack() as stack:
        bootstrap = stack.enter_context(broker())
        whole = stack.enter_context(system(bootstrap, models=[NOOP]))
        worker, gateway = whole.worker(), whole.gateway()
        worker.wait_ready()
        gateway.wait_ready()
        warm(whole, worker, 2_000 if chosen.quick else WARM)
        asyncio.run(closed_loop(gateway.url, seconds))
        urls = {"penstock": gateway.url, "plain": serving(stack, [sys.executable, "-c", PLAIN])}
        try:
            lit = environment("litserve", LITSERVE)
            urls["litserve"] = serving(stack, [str(lit / "python"), str(Path(__file__).with_name("litserve_app.py"))])
        except PeerMissing as error:
            print(f"  without LitServe: {error}", file=sys.stderr, flush=True)
        sides: dict[str, Callable[[], Figures]] = {
            name: lambda url=url: asyncio.run(closed_loop(url, seconds)) for name, url in urls.items()
        }
        sides["penstock"] = lambda: costs(gateway.url, seconds, gateway.popen.pid, worker.popen.pid)
        results, steals = rotate(chosen.rounds, sides)
    ours = results["penstock"]["rate"]
    floors = [("litserve", "LitServe, one worker", "≥ 1.2×"), ("plain", "plain FastAPI", "the ceiling")]
    chats = "no-op chats, 64 at a time"
    rows = [
        Row(f"{chats} (floor: {words})", "requests/s", ours, results[name]["rate"], steals, aim)
        for name, words, aim in floors
        if name in results
    ]
    aims = {"gateway's main thread": "≤ 220", "all processes": "≤ 1,000"}
    rows += [
        Row(f"processor of a chat: {who}", "µs", spent, [], steals, aims.get(who, "–"))
        for who, spent in results["penstock"].items()
        if who != "rate"
    ]
    save("gateway", rows)


if __name__ == "__main__":
    main()
