"""A gateway with an empty disk beside many ended requests: its first chat, its history whole, and what chats pay.

    make bench BENCHMARKS=backfill ARGS="--requests 300000"

The requests and outcomes are written straight onto the topics. Then a new gateway starts, a client asks for chats from
the first moment on, and the seconds from the start of its process are printed: to the first answer, and until the
history is whole. Meanwhile chats are asked for by turns of it and of a gateway that knows the history: the medians and
99th percentiles of their times, and the ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import httpx
import psutil
from common import broker, percentile, system
from confluent_kafka import Consumer, TopicPartition
from gateway_many import fill

from system import Process, System, eventually

BODY = {"model": "noop", "messages": [{"role": "user", "content": "p"}]}


def chat_ms(http: httpx.Client) -> float | None:
    """None while it is refused."""
    began = time.perf_counter()
    try:
        answer = http.post("/v1/chat/completions", json=BODY)
    except httpx.HTTPError:
        return None
    return 1000 * (time.perf_counter() - began) if answer.status_code == 200 else None


def is_whole(http: httpx.Client) -> bool:
    try:
        return http.get("/readyz").json()["status"] == "ready"
    except httpx.HTTPError:
        return False


def client(process: Process) -> httpx.Client:
    return httpx.Client(base_url=process.url, timeout=30)


def reading(whole: System, name: str, old: httpx.Client) -> dict[str, Any]:
    """The figures of one new gateway beside `old`."""
    began = time.monotonic()
    process = whole.gateway(name)
    with client(process) as young:
        while chat_ms(young) is None:
            time.sleep(0.02)
        first_s = time.monotonic() - began
        times: dict[str, list[float]] = {"young": [], "old": []}
        while not is_whole(young):
            for side, http in (("young", young), ("old", old)):
                if (took_ms := chat_ms(http)) is not None:
                    times[side].append(took_ms)
        whole_s = time.monotonic() - began
    memory_mib = psutil.Process(process.popen.pid).memory_full_info().uss // 2**20
    process.stop()
    figures = {side: [round(percentile(ms, share), 1) for share in (0.5, 0.99)] for side, ms in times.items() if ms}
    return {
        "first_chat_s": round(first_s, 2),
        "whole_s": round(whole_s, 1),
        "chats": len(times["young"]),
        "chat_ms_p50_p99": figures,
        "memory_mib": memory_mib,
    }


def skip(whole: System) -> None:
    """Workers begin behind the requests: their outcomes stand there."""
    consumer = Consumer({"bootstrap.servers": whole.bootstrap, "group.id": whole.group, "enable.auto.commit": False})
    ends = whole.ends(whole.names.request_topics())
    consumer.commit(
        offsets=[TopicPartition(topic, number, end) for (topic, number), end in ends.items()], asynchronous=False
    )
    consumer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300_000)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    with broker() as bootstrap, system(bootstrap) as whole:
        fill(whole, arguments.requests, 0)
        skip(whole)
        old = whole.gateway("old")
        whole.worker().wait_ready()
        with client(old) as http:
            eventually(lambda: is_whole(http), 900, old.tail)
            rounds = [reading(whole, f"young{number}", http) for number in range(arguments.rounds)]
    print(json.dumps({"backfill": {"requests": arguments.requests, "rounds": rounds}}, indent=1))


if __name__ == "__main__":
    main()
