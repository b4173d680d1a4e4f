"""A batch of no-op chats beside the bare worker, which gets the same requests straight on its topic: rate, what a line
costs the gateway, and the gateway's peak memory.

The gateway runs only while the batch does, so the floor has the machine to itself. `--lines N`.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
from backlog import WARM, Outcomes, cpu_seconds, encoded_requests, produce, rate, warm
from common import Figures, Row, broker, interleave, options, save, system
from overhead import NOOP

from system import Process, System

LINES = 20_000
CHAT = "/v1/chat/completions"
LOW = 8
ENDED = ("completed", "failed", "expired", "cancelled")


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"line {number} " + "word " * 20}]


def bare_worker(found: System, worker: Process, count: int) -> Figures:
    """From the first record on the topic to the last outcome."""
    records = encoded_requests(count, [{"messages": messages(n)} for n in range(count)], model=NOOP["id"], priority=LOW)
    topic = found.names.request("text_generation", LOW)
    outcomes = Outcomes(found.bootstrap, found.names.result)
    spent, began = cpu_seconds(worker.popen.pid), time.monotonic()
    produce(found.bootstrap, topic, records, len(found.ends([topic])))
    times = outcomes.times_ms((key for key, _ in records), 600)
    took, spent = time.monotonic() - began, cpu_seconds(worker.popen.pid) - spent
    outcomes.close()
    return {"rate": count / took, "steady": rate(times), "worker_us": 1e6 * spent / count}


def batch(found: System, worker: Process, count: int) -> Figures:
    """From the call that makes the batch to its status `completed`, its files written."""
    gateway = found.gateway().wait_ready()
    pid = gateway.popen.pid
    with httpx.Client(base_url=gateway.url, timeout=120) as client:
        file_id = _made(client.post("/v1/files", data={"purpose": "batch"}, files={"file": _input(count)}))["id"]
        spent, began = (cpu_seconds(pid), cpu_seconds(worker.popen.pid)), time.monotonic()
        asked = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        made = _made(client.post("/v1/batches", json=asked))
        while (made := _made(client.get(f"/v1/batches/{made['id']}")))["status"] not in ENDED:
            assert time.monotonic() - began < 600, made
            time.sleep(0.25)
        took = time.monotonic() - began
        spent = cpu_seconds(pid) - spent[0], cpu_seconds(worker.popen.pid) - spent[1]
    assert made["request_counts"] == {"total": count, "completed": count, "failed": 0}, made
    peak_kib = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert peak_kib is not None
    assert gateway.stop() == 0
    gateway_us, worker_us = (1e6 * seconds / count for seconds in spent)
    return {
        "rate": count / took,
        "gateway_us": gateway_us,
        "worker_us": worker_us,
        "peak_mib": int(peak_kib[1]) / 1024,
    }


def _input(count: int) -> bytes:
    lines = [
        {"custom_id": f"c{n}", "method": "POST", "url": CHAT, "body": {"model": NOOP["id"], "messages": messages(n)}}
        for n in range(count)
    ]
    return "\n".join(map(json.dumps, lines)).encode()


def _made(answer: httpx.Response) -> dict[str, Any]:
    answer.raise_for_status()
    return answer.json()


def main() -> None:
    chosen = options(__doc__, rounds=3)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--lines", type=int, default=2_000 if chosen.quick else LINES)
    count = parser.parse_known_args()[0].lines
    with broker() as bootstrap, system(bootstrap, models=[NOOP]) as found:
        worker = found.worker().wait_ready()
        warm(found, worker, 2_000 if chosen.quick else WARM)
        ours, bare, steals = interleave(
            chosen.rounds, lambda: batch(found, worker, count), lambda: bare_worker(found, worker, count)
        )
    rows = [
        Row(f"a batch of {count:,} lines (floor: bare worker)", "lines/s", ours["rate"], bare["rate"], steals, "≥ 0.8"),
        Row("processor, the gateway", "µs a line", ours["gateway_us"], [], steals, "reported"),
        Row("processor, the worker", "µs a line", ours["worker_us"], bare["worker_us"], steals, "reported"),
        Row("peak memory, the gateway", "MiB", ours["peak_mib"], [], steals, "≤ 300 MB"),
    ]
    save("batches", rows)


if __name__ == "__main__":
    main()
