"""Throughput of one worker on the no-op engine: topic to result topic, and through the gateway 64 at a time."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from common import Row, broker, interleave, save, system
from confluent_kafka import Producer
from overhead import BODY, NOOP, Echo

from penstock.schemas.codec import default_codec
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import partition_for
from system import System, eventually, free_port

COUNT = 10_000


def encoded_requests(count: int) -> list[tuple[bytes, bytes]]:
    codec = default_codec()
    pairs: list[tuple[bytes, bytes]] = []
    for number in range(count):
        body = {"task": "text_generation", "payload": {"prompt": "x" * 200, "max_tokens": 16}}
        request = parse_request(body, request_id=f"bench-{time.time_ns()}-{number}", now_ms=time.time_ns() // 10**6)
        pairs.append((request.request_id.encode(), codec.encode(request)))
    return pairs


def produce(bootstrap: str, topic: str, pairs: Sequence[tuple[bytes, bytes]], partitions: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000})
    for key, value in pairs:
        producer.produce(topic, value, key=key, partition=partition_for(key, partitions))
    assert producer.flush(60) == 0


def topic_to_result(found: System) -> dict[str, float]:
    """Requests per second between the first and the last outcome of one backlog (the log's own times)."""
    pairs = encoded_requests(COUNT)
    wanted = {key for key, _ in pairs}
    topic = found.names.request("text_generation", 5)
    before = sum(found.ends([found.names.result]).values())
    produce(found.bootstrap, topic, pairs, len(found.ends([topic])))
    eventually(lambda: found.lag() == 0, 120, lambda: f"lag {found.lag()}\n{found.processes[0].tail()}")
    times = sorted(m.timestamp()[1] for m in found.read(found.names.result) if m.key() in wanted)
    assert len(times) >= COUNT, f"{len(times)} results after {before}"
    return {"rate": (len(times) - 1) / max(0.001, (times[-1] - times[0]) / 1000)}


def echo_rate(echo: Echo) -> dict[str, float]:
    """The same backlog through the bare echo."""
    pairs = encoded_requests(COUNT)
    produce(echo.bootstrap, echo.source, pairs, 4)
    times: list[int] = []
    give_up = time.monotonic() + 60
    wanted = {key for key, _ in pairs}
    while len(times) < COUNT:
        assert time.monotonic() < give_up, f"the echo gave {len(times)} of {COUNT}"
        message = echo.consumer.poll(1)
        if message is not None and message.key() in wanted:
            times.append(message.timestamp()[1])
    return {"rate": (len(times) - 1) / max(0.001, (max(times) - min(times)) / 1000)}


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


def main(rounds: int = 5) -> None:
    rows: list[Row] = []
    with broker() as bootstrap:
        with system(bootstrap, models=[NOOP]) as found:
            found.worker().wait_ready()
            echo = Echo(bootstrap)
            ours, floors, steals = interleave(rounds, lambda: topic_to_result(found), lambda: echo_rate(echo))
            echo.close()
            rows.append(
                Row(
                    "no-op throughput, topic to result topic",
                    "requests/s",
                    ours["rate"],
                    floors["rate"],
                    steals,
                    "3,000/s",
                )
            )
        with system(bootstrap, models=[NOOP]) as found:
            worker, gateway = found.worker(), found.gateway()
            worker.wait_ready()
            gateway.wait_ready()
            plain, url = plain_fastapi()
            ours, floors, steals = interleave(
                rounds,
                lambda: asyncio.run(closed_loop(gateway.url, "/v1/chat/completions", 64, 6)),
                lambda: asyncio.run(closed_loop(url, "/echo", 64, 6)),
            )
            plain.kill()
            plain.wait()
            rows.append(
                Row(
                    "no-op throughput through the gateway, 64 at a time (floor: plain FastAPI)",
                    "requests/s",
                    ours["rate"],
                    floors["rate"],
                    steals,
                    "800/s",
                )
            )
    save("throughput", rows)


if __name__ == "__main__":
    main()
