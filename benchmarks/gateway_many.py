"""A gateway that knows half a million ended requests, a tenth of them embeddings: lists, look-ups, loop and memory.

    make bench BENCHMARKS=gateway_many ARGS="--requests 500000"

The requests and outcomes are written straight onto the topics. Then a new gateway reads them all, and a client asks for
pages, filtered pages and single requests, while a watchdog on the gateway's own loop notes its longest pauses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from common import broker, percentile, system
from confluent_kafka import Producer

from penstock.schemas.codec import default_codec
from penstock.schemas.ids import new_request_id
from penstock.schemas.records import Origin, ResultEvent
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import partition_for
from system import System, eventually, free_port

FLOATS = [[0.001 * number for number in range(1_024)]] * 2
WATCH_S = 0.005


def serve(port: int) -> None:
    """A gateway as `penstock gateway` runs it, with a watchdog on its loop and a route that tells what it saw."""
    import uvicorn
    import uvloop

    from penstock.gateway.app import create_app, server_config
    from penstock.gateway.settings import GatewaySettings

    app = create_app(GatewaySettings())
    pauses: list[float] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(WATCH_S)
            pauses.append(loop.time() - began - WATCH_S)

    async def told() -> dict[str, Any]:
        worst = sorted(pauses)[-5:]
        pauses.clear()
        return {"worst_ms": [round(1000 * pause, 1) for pause in worst]}

    app.router.add_api_route("/healthz/loop", told)
    server = uvicorn.Server(server_config(app, "127.0.0.1", port, drain_s=1))

    async def run() -> None:
        watching = asyncio.create_task(watch())
        await server.serve()
        watching.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def records(count: int) -> Iterator[tuple[Any, Any, Any]]:
    """(request, its outcome, its id as a key), every tenth an embedding of 2 × 1,024 floats."""
    for number in range(count):
        embedding = number % 10 == 0
        body: dict[str, Any] = {"task": "embedding", "payload": {"input": ["a", "b"]}}
        if not embedding:
            messages = [{"role": "user", "content": f"question {number}"}]
            body = {"task": "text_generation", "payload": {"messages": messages}, "priority": number % 10}
            if number % 7 == 0:
                body["conversation_id"] = f"c{number % 500}"
        request = parse_request(body, request_id=new_request_id(), now_ms=time.time_ns() // 10**6)
        output = {"embeddings": FLOATS, "dimensions": 1_024} if embedding else {"text": f"answer {number} " * 20}
        outcome = {"embedding": output} if embedding else {"text_generation": output}
        yield request, outcome, request.request_id.encode()


def fill(whole: System, count: int) -> list[str]:
    """Write the requests, then their outcomes; the ids."""
    codec, names = default_codec(), whole.names
    producer = Producer({"bootstrap.servers": whole.bootstrap, "linger.ms": 20, "compression.type": "lz4"})
    ids: list[str] = []
    for number, (request, outcome, key) in enumerate(records(count)):
        topic = names.request(request.task, request.priority)
        producer.produce(topic, codec.encode(request), key=key)
        event = ResultEvent(
            request_id=request.request_id,
            tenant="default",
            kind="terminal",
            status="completed",
            origin=Origin(topic=topic, partition=0, offset=number, append_time_ms=request.created_at),
            task=request.task,
            attempt=1,
            epoch=1,
            created_at=request.created_at + 5,
            worker_id="fill",
            model="m",
            **outcome,
        )
        producer.produce(names.result, codec.encode(event), key=key, partition=partition_for(key, 4))
        ids.append(request.request_id)
        while len(producer) > 50_000:
            producer.poll(0.05)
        producer.poll(0)
    assert producer.flush(120) == 0
    return ids


def measure(http: httpx.Client, ids: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """Latencies in ms by kind of question, the kinds by turns."""
    chance = random.Random(1)
    asked: dict[str, list[float]] = {}
    last = http.get("/v1/requests", params={"limit": 20}).json()["last_id"]
    for _ in range(rounds):
        questions = {
            "page": "/v1/requests?limit=20",
            "page behind another": f"/v1/requests?limit=20&after={last}",
            "completed": "/v1/requests?limit=20&status=completed",
            "failed (none)": "/v1/requests?limit=20&status=failed",
            "of a conversation": f"/v1/requests?limit=20&conversation_id=c{7 * chance.randrange(70)}",
            "one request": f"/v1/requests/{chance.choice(ids)}",
            "stats": "/v1/stats",
        }
        for kind, path in questions.items():
            began = time.perf_counter()
            answer = http.get(path)
            asked.setdefault(kind, []).append(1000 * (time.perf_counter() - began))
            assert answer.status_code == 200, answer.text
    return {
        kind: {"p50": round(percentile(values, 0.5), 2), "p99": round(percentile(values, 0.99), 2)}
        for kind, values in asked.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="20,000 requests")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    count = 20_000 if arguments.quick else arguments.requests
    with broker() as bootstrap, system(bootstrap) as whole:
        began = time.monotonic()
        ids = fill(whole, count)
        filled_s = time.monotonic() - began
        port = free_port()
        env = {"PENSTOCK_CONFIG": str(whole.config()), "PENSTOCK_GATEWAY__VIEW_PATH": str(whole.folder / "many.sqlite")}
        began = time.monotonic()
        with (whole.folder / "many.log").open("wb") as log:
            command = [sys.executable, str(Path(__file__)), "--serve", str(port)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **env})
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:

                def ready() -> bool:
                    try:
                        return http.get("/readyz").status_code == 200
                    except httpx.HTTPError:
                        return False

                eventually(ready, 600, lambda: (whole.folder / "many.log").read_text()[-2_000:])
                read_s = time.monotonic() - began
                cpu = psutil.Process(process.pid).cpu_times()
                reading = http.get("/healthz/loop").json()
                eventually(lambda: http.get(f"/v1/requests/{ids[-1]}").json()["done"], 60, lambda: "not written")
                http.get("/healthz/loop")
                figures = measure(http, ids, arguments.rounds)
                asking = http.get("/healthz/loop").json()
            mib = psutil.Process(process.pid).memory_full_info().uss // 2**20
        finally:
            process.terminate()
            process.wait(30)
    result = {
        "requests": count,
        "filled_s": round(filled_s, 1),
        "read_s": round(read_s, 1),
        "records_per_s": round(2 * count / read_s),
        "cpu_us_per_record": round(1e6 * (cpu.user + cpu.system) / (2 * count)),
        "loop_while_reading": reading,
        "loop_while_asked": asking,
        "memory_mib": mib,
        "latencies_ms": figures,
    }
    print(json.dumps({"gateway_many": result}, indent=1))


if __name__ == "__main__":
    main()
