"""Overhead: gateway HTTP in → result out, no-op engine at 50 requests/s, against a two-hop echo of equal bytes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import aiohttp
from backlog import WARM, warm
from common import Row, broker, interleave, options, percentile, save, system
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

NOOP = {"id": "noop", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": {"tokens": 1}}
BODY = {"model": "noop", "messages": [{"role": "user", "content": "x" * 200}], "max_tokens": 16}


async def post_at_rate(url: str, rate: float, seconds: float) -> list[float]:
    """Latencies in ms of open-loop requests: each starts at its time, however late the others are."""
    latencies: list[float] = []

    async def one(session: aiohttp.ClientSession) -> None:
        began = time.perf_counter()
        async with session.post(url + "/v1/chat/completions", json=BODY) as answer:
            body = await answer.read()
            assert answer.status == 200, body
        latencies.append(1000 * (time.perf_counter() - began))

    async with aiohttp.ClientSession() as session:
        began, tasks = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(one(session)))
        await asyncio.gather(*tasks)
    return latencies


class Echo:
    """The two-hop floor: produce → echo process → consume, with the same number of bytes."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        run = uuid.uuid4().hex[:6]
        self.source, self.target = f"echo-in-{run}", f"echo-out-{run}"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for future in admin.create_topics([NewTopic(t, 4, 1) for t in (self.source, self.target)]).values():
            future.result(20)
        script = str(Path(__file__).with_name("echo.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, bootstrap, self.source, self.target], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.producer = Producer(
            {"bootstrap.servers": bootstrap, "linger.ms": 0, "acks": "all", "enable.idempotence": True}
        )
        self.consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "floor", "fetch.wait.max.ms": 100})
        self.consumer.assign([TopicPartition(self.target, n, 0) for n in range(4)])
        self.measure(20, 2)  # joins the group, warms the path

    def measure(self, rate: float, seconds: float) -> list[float]:
        count = int(rate * seconds)
        sent: dict[bytes, float] = {}
        latencies: list[float] = []

        def consume() -> None:
            give_up = time.monotonic() + seconds + 30
            while len(latencies) < count and time.monotonic() < give_up:
                message = self.consumer.poll(0.5)
                if message is not None and message.error() is None:
                    began = sent.get(message.key() or b"")
                    if began is not None:
                        latencies.append(1000 * (time.perf_counter() - began))

        thread = threading.Thread(target=consume)
        thread.start()
        value = json.dumps(BODY).encode()
        began = time.perf_counter()
        for number in range(count):
            time.sleep(max(0.0, began + number / rate - time.perf_counter()))
            key = uuid.uuid4().bytes
            sent[key] = time.perf_counter()
            self.producer.produce(self.source, value, key=key)
            self.producer.poll(0)
        self.producer.flush(20)
        thread.join()
        assert len(latencies) == count, f"{len(latencies)} of {count} came back"
        return latencies

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.consumer.close()


def figures(latencies: list[float]) -> dict[str, float]:
    return {"p50": percentile(latencies, 0.5), "p99": percentile(latencies, 0.99)}


def main() -> None:
    chosen = options(__doc__, rounds=6)
    rate, seconds = 50, 3 if chosen.quick else 8
    with broker() as bootstrap, system(bootstrap, models=[NOOP]) as found:
        worker, gateway = found.worker(), found.gateway()
        worker.wait_ready()
        gateway.wait_ready()
        warm(found, worker, 2_000 if chosen.quick else WARM)
        asyncio.run(post_at_rate(gateway.url, rate, 3))
        echo = Echo(bootstrap)
        ours, floors, steals = interleave(
            chosen.rounds,
            lambda: figures(asyncio.run(post_at_rate(gateway.url, rate, seconds))),
            lambda: figures(echo.measure(rate, seconds)),
        )
        echo.close()
    save(
        "overhead",
        [
            Row("overhead at 50 requests/s, p50", "ms", ours["p50"], floors["p50"], steals, "≤ 2.5×"),
            Row("overhead at 50 requests/s, p99", "ms", ours["p99"], floors["p99"], steals, "≤ 3×"),
        ],
    )


if __name__ == "__main__":
    main()
