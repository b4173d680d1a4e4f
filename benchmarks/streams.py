"""Streamed chats through Penstock to a server that makes a token each 20 ms and stream, beside the same calls of it.

Tokens a second, the first token, the gap between pieces, and the processor time of a token by process.

    make bench BENCHMARKS=streams ARGS="--streams 1 8 32 64 --rounds 5"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from backlog import cpu_seconds
from common import Figures, Row, broker, options, percentile, rotate, save, system

from system import eventually, free_port

TOKENS = 200
SERVER = Path(__file__).with_name("stream_server.py")
BODY = {"model": "m", "stream": True, "max_tokens": TOKENS, "messages": [{"role": "user", "content": "Hi"}]}


class Seen(NamedTuple):
    tokens: int
    first_s: float
    gaps_s: list[float]


async def stream(port: int) -> Seen:
    """One chat on a connection of its own, read as bytes, so that the client costs the machine little."""
    loop = asyncio.get_running_loop()
    body = json.dumps(BODY).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = ["host: 127.0.0.1", "content-type: application/json", f"content-length: {len(body)}"]
    head = "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *lines])
    began = last = loop.time()
    writer.write(f"{head}\r\n\r\n".encode() + body)
    tokens, first_s, gaps = 0, 0.0, list[float]()
    while b"[DONE]" not in (data := await reader.read(1 << 16)):
        if not data:
            raise SystemExit("a stream broke off")
        if came := data.count(b" w"):
            now = loop.time()
            gaps += [now - last] if tokens else []
            first_s = first_s or now - began
            tokens, last = tokens + came, now
    writer.close()
    return Seen(tokens, first_s, gaps)


async def streams(port: int, count: int) -> Figures:
    loop = asyncio.get_running_loop()
    began = loop.time()
    seen = await asyncio.gather(*(stream(port) for _ in range(count)))
    gaps = [gap for one in seen for gap in one.gaps_s]
    return {
        "tokens/s": sum(one.tokens for one in seen) / (loop.time() - began),
        "first token, p50, ms": 1e3 * percentile([one.first_s for one in seen], 0.5),
        "gap, p50, ms": 1e3 * percentile(gaps, 0.5),
        "gap, p99, ms": 1e3 * percentile(gaps, 0.99),
    }


def measured(port: int, count: int, processes: dict[str, int]) -> Figures:
    before = {name: cpu_seconds(pid) for name, pid in processes.items()}
    figures = asyncio.run(streams(port, count))
    spent = {name: cpu_seconds(pid) - before[name] for name, pid in processes.items()}
    return figures | {f"{name}, us a token": 1e6 * one / (count * TOKENS) for name, one in spent.items()}


def main() -> None:
    chosen = options(__doc__, rounds=5)
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="+", default=[8] if chosen.quick else [1, 8, 32, 64])
    counts = parser.parse_known_args()[0].streams
    port, rows = free_port(), list[Row]()
    with ExitStack() as stack:
        server = subprocess.Popen([sys.executable, str(SERVER), str(port)])
        stack.callback(server.kill)
        bootstrap = stack.enter_context(broker())
        model = {"id": "m", "source": f"http://127.0.0.1:{port}", "engine": "remote", "tasks": ["text_generation"]}
        models = [model | {"options": {"slots": max(counts)}}]
        found = stack.enter_context(system(bootstrap, models=models)).start_all(["w1", "g1"])
        worker, gateway = found.process("w"), found.process("g")
        kafka = [one.pid for one in psutil.Process().children(recursive=True) if one.name() == "java"]
        processes = {
            "worker": worker.popen.pid,
            "gateway": gateway.popen.pid,
            **dict.fromkeys(["Kafka"][: len(kafka)], *kafka[:1]),
        }
        eventually(lambda: asyncio.run(streams(port, 1)), 20, lambda: "the server does not listen")
        for _ in range(1 if chosen.quick else 5):
            asyncio.run(streams(gateway.port, max(counts)))  # warms it
        for count in counts:
            sides = {
                "direct": partial(measured, port, count, {}),
                "through": partial(measured, gateway.port, count, processes),
            }
            results, steals = rotate(chosen.rounds, sides)
            for figure, values in results["through"].items():
                unit = figure.rsplit(", ", 1)[-1]
                rows.append(
                    Row(f"{count} streams: {figure}", unit, values, results["direct"].get(figure, []), steals, "–")
                )
    save("streams", rows)


if __name__ == "__main__":
    main()
