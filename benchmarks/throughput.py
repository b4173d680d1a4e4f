"""Throughput of one worker on the no-op engine: topic to result topic beside a bare echo and Celery on Redis, the main
thread's time for each request, and through the gateway 64 at a time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from backlog import WARM, encoded_requests, produce, rate, run_backlog, warm
from common import Figures, Row, broker, options, rotate, save, system
from overhead import BODY, NOOP, Echo
from peers import CeleryPeer, PeerMissing, celery_peer

from system import Process, System, eventually, free_port

COUNT = 10_000
CELERY_COUNT = 2_000


def echo_rate(echo: Echo, count: int) -> Figures:
    """The same backlog through the bare echo."""
    pairs = encoded_requests(count)
    produce(echo.bootstrap, echo.source, pairs, 4)
    times: list[int] = []
    give_up = time.monotonic() + 60
    wanted = {key for key, _ in pairs}
    while len(times) < count:
        assert time.monotonic() < give_up, f"the echo gave {len(times)} of {count}"
        message = echo.consumer.poll(1)
        if message is not None and message.key() in wanted:
            times.append(message.timestamp()[1])
    return {"rate": rate(times)}


async def closed_loop(url: str, path: str, clients: int, seconds: float) -> dict[str, float]:
    count, stop = 0, time.perf_counter() + seconds

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal count
        while time.perf_counter() < stop:
            async with session.post(url + path, json=BODY) as answer:
                body = await answer.read()
                assert answer.status == 200, body
            count += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(one(session) for _ in range(clients)))
        return {"rate": count / (time.perf_counter() - began)}


PLAIN = """
import sys, uvicorn
from fastapi import FastAPI, Request
app = FastAPI()
@app.post("/echo")
async def echo(request: Request) -> dict: return await request.json()
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
"""


def plain_fastapi() -> tuple[subprocess.Popen[bytes], str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", PLAIN, str(port)], cwd=Path(__file__).parent)
    url = f"http://127.0.0.1:{port}"

    def up() -> bool:
        try:
            asyncio.run(closed_loop(url, "/echo", 1, 0.01))
        except aiohttp.ClientError:
            return False
        return True

    eventually(up, 30, lambda: "plain FastAPI did not start")
    return process, url


def peer_or_none(stack: ExitStack) -> CeleryPeer | None:
    try:
        return stack.enter_context(celery_peer())
    except PeerMissing as error:
        print(f"  without Celery: {error}", file=sys.stderr, flush=True)
        return None


def topic_to_result(found: System, worker: Process, *, rounds: int, quick: bool) -> list[Row]:
    count = 2_000 if quick else COUNT
    with ExitStack() as stack:
        echo = Echo(found.bootstrap)
        stack.callback(echo.close)
        sides: dict[str, Callable[[], Figures]] = {
            "penstock": lambda: run_backlog(found, worker, encoded_requests(count)),
            "echo": lambda: echo_rate(echo, count),
        }
        peer = peer_or_none(stack)
        if peer is not None:
            peer.measure(200)
            sides["celery"] = lambda: peer.measure(500 if quick else CELERY_COUNT)
        warm(found, worker, 2_000 if quick else WARM)
        results, steals = rotate(rounds, sides)
    ours, celery = results["penstock"], results.get("celery", {}).get("rate", [])
    return [
        Row(
            "no-op, topic to result topic (floor: Celery on Redis)", "requests/s", ours["rate"], celery, steals, "≥ 8×"
        ),
        Row(
            "no-op, topic to result topic (floor: bare echo)",
            "requests/s",
            ours["rate"],
            results["echo"]["rate"],
            steals,
            "4,000/s",
        ),
        Row("worker's main thread, a request", "µs", ours["main_us"], [], steals, "≤ 150"),
        Row("worker's process, a request", "µs", ours["process_us"], [], steals, "reported"),
    ]


def through_the_gateway(found: System, *, rounds: int, quick: bool) -> Row:
    worker, gateway = found.worker(), found.gateway()
    worker.wait_ready()
    gateway.wait_ready()
    warm(found, worker, 2_000 if quick else WARM)
    plain, url = plain_fastapi()
    seconds = 2 if quick else 6
    results, steals = rotate(
        rounds,
        {
            "penstock": lambda: asyncio.run(closed_loop(gateway.url, "/v1/chat/completions", 64, seconds)),
            "plain": lambda: asyncio.run(closed_loop(url, "/echo", 64, seconds)),
        },
    )
    plain.kill()
    plain.wait()
    name = "no-op throughput through the gateway, 64 at a time (floor: plain FastAPI)"
    return Row(name, "requests/s", results["penstock"]["rate"], results["plain"]["rate"], steals, "800/s")


def main() -> None:
    chosen = options(__doc__, rounds=5)
    with broker() as bootstrap:
        with system(bootstrap, models=[NOOP]) as found:
            worker = found.worker().wait_ready()
            rows = topic_to_result(found, worker, rounds=chosen.rounds, quick=chosen.quick)
        with system(bootstrap, models=[NOOP]) as found:
            rows.append(through_the_gateway(found, rounds=chosen.rounds, quick=chosen.quick))
    save("throughput", rows)


if __name__ == "__main__":
    main()
