"""A gateway that knows half a million ended requests, a tenth of them embeddings: lists, look-ups, loop and memory.

    make bench BENCHMARKS=gateway_many ARGS="--requests 500000"
    make bench BENCHMARKS=gateway_many ARGS="--requests 50000 --chunks 20"
    make bench BENCHMARKS=gateway_many ARGS="--requests 50000 --chunks 0"
    make bench BENCHMARKS=gateway_many ARGS="--requests 50000 --waiting"

The requests and outcomes are written straight onto the topics. With `--chunks` every request is a text with two
statuses, streamed in so many pieces, or not at all with 0. With `--waiting` no request has begun, and only the reading
is measured. Then a new gateway reads them all, `--readings` times with an empty view, and a client asks for pages,
filtered pages and single requests, while a watchdog on the gateway's own loop notes its longest pauses. The floor is a
consumer that reads the same topics before each reading and does nothing with the records. At last the gateway is
started again with the view that it has.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from common import broker, percentile, system
from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.schemas.codec import default_codec
from penstock.schemas.ids import new_request_id
from penstock.schemas.records import STATUS_RANKS, InferenceRequest, Origin, ResultEvent, StatusEvent
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import partition_for
from system import System, eventually, free_port

FLOATS = [[0.001 * number for number in range(1_024)]] * 2
WATCH_S = 0.005
TOGETHER = 64


def serve(port: int) -> None:
    """A gateway as `penstock gateway` runs it, with a watchdog on its loop: at SIGUSR1 what it saw goes to a file."""
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
            if server.started:  # nobody waits for one that does not serve yet
                pauses.append(loop.time() - began - WATCH_S)

    def tell() -> None:
        worst = sorted(pauses)[-5:]
        pauses.clear()
        told = Path(os.environ["PENSTOCK_GATEWAY__VIEW_PATH"]).with_suffix(".loop")
        told.with_suffix(".new").write_text(json.dumps({"worst_ms": [round(1000 * pause, 1) for pause in worst]}))
        told.with_suffix(".new").rename(told)

    server = uvicorn.Server(server_config(app, "127.0.0.1", port, drain_s=1))

    async def run() -> None:
        watching = asyncio.create_task(watch())
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
        await server.serve()
        watching.cancel()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def records(count: int, chunks: int | None) -> Iterator[tuple[Any, Any, Any]]:
    """(request, its outcome, its id as a key), every tenth an embedding of 2 × 1,024 floats unless all are texts."""
    for number in range(count):
        embedding = number % 10 == 0 and chunks is None
        body: dict[str, Any] = {"task": "embedding", "payload": {"input": ["a", "b"]}}
        if not embedding:
            messages = [{"role": "user", "content": f"question {number}"}]
            body = {"task": "text_generation", "payload": {"messages": messages}, "priority": number % 10}
            body["stream"] = bool(chunks)
            if number % 7 == 0:
                body["conversation_id"] = f"c{number % 500}"
        request = parse_request(body, request_id=new_request_id(), now_ms=time.time_ns() // 10**6)
        output = {"embeddings": FLOATS, "dimensions": 1_024} if embedding else {"text": f"answer {number} " * 20}
        outcome = {"embedding": output} if embedding else {"text_generation": output}
        yield request, outcome, request.request_id.encode()


def events_of(request: InferenceRequest, topic: str, number: int, outcome: Any, chunks: int | None) -> Iterator[Any]:
    """What a worker says of a request, in its order."""
    common: dict[str, Any] = {
        "request_id": request.request_id,
        "tenant": "default",
        "origin": Origin(topic=topic, partition=0, offset=number, append_time_ms=request.created_at),
        "attempt": 1,
        "epoch": 1,
        "created_at": request.created_at + 5,
        "worker_id": "fill",
    }
    event = ResultEvent(kind="terminal", status="completed", task=request.task, model="m", **outcome, **common)
    if chunks is not None:
        yield StatusEvent(status="running", done=False, rank=STATUS_RANKS["running"], model="m", **common)
    if chunks:
        whole = outcome["text_generation"]["text"]
        size = max(1, len(whole) // chunks)
        for at in range(chunks):
            text = whole[at * size : (at + 1) * size if at < chunks - 1 else len(whole)]
            yield dataclasses.replace(
                event,
                kind="chunk",
                status=None,
                model=None,
                text_generation=None,
                text=text,
                text_offset=at * size,
                token_ids=[at],
                first_token_index=at,
            )
    yield event
    if chunks is not None:
        yield StatusEvent(status="completed", done=True, rank=STATUS_RANKS["completed"], model="m", **common)


def fill(whole: System, count: int, chunks: int | None = None, *, waiting: bool = False) -> list[str]:
    """Write the requests, and what a worker that runs `TOGETHER` at a time says of them unless they wait; the ids."""
    codec, names = default_codec(), whole.names
    producer = Producer({"bootstrap.servers": whole.bootstrap, "linger.ms": 20, "compression.type": "lz4"})
    ids: list[str] = []
    found = enumerate(records(count, chunks))
    while some := list(itertools.islice(found, TOGETHER)):
        told: list[Iterator[Any]] = []
        for number, (request, outcome, key) in some:
            topic = names.request(request.task, request.priority)
            producer.produce(topic, codec.encode(request), key=key)
            told.append(iter(()) if waiting else events_of(request, topic, number, outcome, chunks))
            ids.append(request.request_id)
        for event in (one for turn in itertools.zip_longest(*told) for one in turn if one is not None):
            topic = names.result if isinstance(event, ResultEvent) else names.status
            key = event.request_id.encode()
            producer.produce(topic, codec.encode(event), key=key, partition=partition_for(key, 4))
            while len(producer) > 50_000:
                producer.poll(0.05)
        producer.poll(0)
    assert producer.flush(120) == 0
    return ids


def bare(whole: System) -> tuple[int, float]:
    """(records, seconds) of a consumer that reads the same topics and looks at nothing."""
    names = whole.names
    consumer = Consumer({"bootstrap.servers": whole.bootstrap, "group.id": "bare", "enable.auto.commit": False})
    topics = [names.result, names.status, *names.request_topics()]
    known = consumer.list_topics(timeout=10).topics
    partitions = [TopicPartition(topic, number, 0) for topic in topics for number in known[topic].partitions]
    left = sum(consumer.get_watermark_offsets(one, 10)[1] for one in partitions)
    total, began = left, time.monotonic()
    consumer.assign(partitions)
    while left > 0:
        left -= len(consumer.consume(500, 1.0))
    took = time.monotonic() - began
    consumer.close()
    return total, took


def read_all(whole: System, port: int) -> tuple[subprocess.Popen[bytes], dict[str, float]]:
    """A gateway that has read all into an empty view, and its figures beside those of the floor a moment before."""
    for path in whole.folder.glob("many.sqlite*"):
        path.unlink()
    total, bare_s = bare(whole)
    process = start(whole, port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
        read_s = until_ready(http, whole)
    cpu = psutil.Process(process.pid).cpu_times()
    return process, {
        "read_s": round(read_s, 1),
        "records_per_s": round(total / read_s),
        "bare_records_per_s": round(total / bare_s),
        "ratio": round(bare_s / read_s, 3),
        "cpu_us_per_record": round(1e6 * (cpu.user + cpu.system) / total, 1),
    }


def read_again(whole: System, port: int, readings: int) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """The same several times: the last gateway, the medians, and all ratios."""
    found: list[dict[str, float]] = []
    while True:
        process, figures = read_all(whole, port)
        found.append(figures)
        if len(found) == readings:
            medians = {name: statistics.median(one[name] for one in found) for name in figures}
            return process, {**medians, "ratios": [one["ratio"] for one in found]}
        process.kill()
        process.wait(30)


def start(whole: System, port: int) -> subprocess.Popen[bytes]:
    """A gateway of its own process, with the view of this run."""
    env = {"PENSTOCK_CONFIG": str(whole.config()), "PENSTOCK_GATEWAY__VIEW_PATH": str(whole.folder / "many.sqlite")}
    with (whole.folder / "many.log").open("wb") as log:
        command = [sys.executable, str(Path(__file__)), "--serve", str(port)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **env})


def pauses(process: subprocess.Popen[bytes], whole: System) -> dict[str, Any]:
    """The longest pauses of the gateway's loop since it was last asked."""
    told = whole.folder / "many.loop"
    told.unlink(missing_ok=True)
    process.send_signal(signal.SIGUSR1)
    eventually(told.exists, 10, lambda: "the gateway's watchdog says nothing")
    return json.loads(told.read_text())


def until_ready(http: httpx.Client, whole: System) -> float:
    """Wait until the gateway has read all; the seconds since it began to read."""
    answered: list[float] = []

    def ready() -> bool:
        try:
            answer = http.get("/readyz")
        except httpx.HTTPError:
            return False
        if answer.status_code == 200 or "catching up" in answer.text:
            answered.append(time.monotonic())
        return answer.status_code == 200 and "history until" not in answer.text

    eventually(ready, 600, lambda: (whole.folder / "many.log").read_text()[-2_000:])
    return answered[-1] - answered[0]


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
    parser.add_argument("--chunks", type=int, help="texts alone, each in so many pieces; 0: texts that do not stream")
    parser.add_argument("--waiting", action="store_true", help="texts that no worker has begun")
    parser.add_argument("--readings", type=int, default=3, help="how often an empty view reads all")
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
        ids = fill(whole, count, 0 if arguments.waiting else arguments.chunks, waiting=arguments.waiting)
        filled_s = time.monotonic() - began
        port = free_port()
        process, read = read_again(whole, port, arguments.readings)
        if arguments.waiting:
            process.kill()
            process.wait(30)
            print(json.dumps({"gateway_many": {"requests": count, **read}}, indent=1))
            return
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                reading = pauses(process, whole)
                eventually(lambda: http.get(f"/v1/requests/{ids[-1]}").json()["done"], 60, lambda: "not written")
                pauses(process, whole)
                figures = measure(http, ids, arguments.rounds)
                asking = pauses(process, whole)
            mib = psutil.Process(process.pid).memory_full_info().uss // 2**20
            process.terminate()
            process.wait(30)
            process = start(whole, port)
            began = time.monotonic()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
                until_ready(http, whole)
                assert http.get(f"/v1/requests/{ids[0]}").json()["done"]
                again_s = time.monotonic() - began
        finally:
            process.terminate()
            process.wait(30)
        file_mib = sum(path.stat().st_size for path in whole.folder.glob("many.sqlite*")) // 2**20
    result = {
        "requests": count,
        "filled_s": round(filled_s, 1),
        **read,
        "started_again_s": round(again_s, 1),
        "file_mib": file_mib,
        "loop_while_reading": reading,
        "loop_while_asked": asking,
        "memory_mib": mib,
        "latencies_ms": figures,
    }
    print(json.dumps({"gateway_many": result}, indent=1))


if __name__ == "__main__":
    main()
