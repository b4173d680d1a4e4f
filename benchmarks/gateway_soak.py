"""A soak of four gateways: mixed clients for some minutes, with a fault every twenty seconds.

One gateway lives through all of it, two of the others are killed with -9 together at times; workers are killed, the
broker stands still. Then: no answer of 5xx but 503 with Retry-After, every accepted request has an outcome at the
gateway that lived, and that gateway's threads, descriptors and memory are about what they were after the first fifth of
the time. Who followed a stream went on at another gateway with its cursor, and put it together without a seam. At the
end no gateway counts a request as under way.

    make bench BENCHMARKS=gateway_soak ARGS="--minutes 15"
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from common import system

from penstock.cli.embedded_kafka import EmbeddedKafka
from system import Process, System, free_port

QUICK = {"id": "quick", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": {"tokens": 2}}
SLOW = {**QUICK, "id": "slow", "options": {"tokens": 30, "delay_ms": 20, "slots": 32}}
LONG = {**QUICK, "id": "long", "options": {"tokens": 200, "delay_ms": 30, "slots": 64}}
EMBED = {**QUICK, "id": "embed", "tasks": ["embedding"]}
GATEWAYS = ("g1", "g2", "g3", "g4")
FAULT_EVERY_S = 20.0
RATE = 15.0
GROWTH = {"threads": 24, "descriptors": 40, "mib": 64}
"""What the gateway and the worker that live may have more at the end than after the first fifth of the time.

A gateway reads conversations on up to 8 threads and keeps up to 8 clients of Kafka for that, with 4 threads each: how
many of them there are follows from how many reads came at once.
"""
LIVE = ("g1", "w2")
RECENT_BYTES = 4_000_000
"""Of ended requests in a gateway's memory: filled soon, so that what still grows later is something else."""


@dataclass
class Seen:
    """What the clients were answered."""

    answers: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])
    accepted: list[str] = field(default_factory=list[str])
    broken: Counter[str] = field(default_factory=Counter[str])
    """Connections that ended without an answer: those of the gateways that were killed, one hopes."""
    seams: list[str] = field(default_factory=list[str])
    resumed: int = 0
    """Streams that were gone on with at another gateway."""

    def note(self, what: str, status: int, headers: Any, body: bytes) -> None:
        self.answers[f"{what} {status}"] += 1
        if status >= 500 and (status != 503 or "retry-after" not in {name.lower() for name in headers}):
            self.wrong.append(f"{what} {status} {body[:200]!r}")


class Reader:
    """Puts the frames of one stream together, over several connections."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._text = self._id = ""
        self.cursor: str | None = None
        self.ended = False
        self.fault: str | None = None

    def take(self, line: str) -> None:
        """A line of server-sent events."""
        if line.startswith("id: "):
            self._id = line[4:]
        if not line.startswith("data: ") or self.fault is not None:
            return
        frame = json.loads(line[6:])
        match frame["type"]:
            case "chunk":
                if frame["offset"] != len(self._text):
                    self.fault = f"{self._request_id}: {len(self._text)} characters, then a chunk at {frame['offset']}"
                self._text += frame["text"]
            case "restarted":
                self._text = ""
            case "snapshot":
                self._text = frame["text"]
            case "result":
                self.ended = True
                text = (frame["result"] or {}).get("text", "")
                if frame["status"] == "completed" and text != self._text:
                    self.fault = f"{self._request_id}: told {len(self._text)} characters of {len(text)}"
            case _:
                pass
        self.cursor = self._id


class Clients:
    """One client of each kind; each call is one exchange with a gateway."""

    def __init__(self, session: aiohttp.ClientSession, seen: Seen, gateways: dict[str, Process]) -> None:
        self._session = session
        self._seen = seen
        self._gateways = gateways

    async def _http(self, what: str, method: str, url: str, **options: Any) -> tuple[int, bytes]:
        async with self._session.request(method, url, **options) as answer:
            body = await answer.read()
            self._seen.note(what, answer.status, answer.headers, body)
            return answer.status, body

    async def _submit(self, url: str, **fields: Any) -> str | None:
        body = {"task": "text_generation", "payload": {"prompt": "hi"}, "model": "quick", **fields}
        status, answer = await self._http("submit", "POST", f"{url}/v1/requests", json=body)
        if status != 202:
            return None
        request_id = json.loads(answer)["request_id"]
        self._seen.accepted.append(request_id)
        return request_id

    async def poll(self, url: str) -> None:
        request_id = await self._submit(url)
        if request_id:
            await self._http("wait", "GET", f"{url}/v1/requests/{request_id}?wait=20")

    async def follow(self, url: str) -> None:
        request_id = await self._submit(url, model="slow", stream=True)
        if request_id:
            await self._http("events", "GET", f"{url}/v1/requests/{request_id}/events")

    async def resume(self, url: str) -> None:
        """Follow a stream to its end, at whichever gateway answers; frames must fit together."""
        request_id = await self._submit(url, model="long", stream=True)
        if request_id is None:
            return
        reader, give_up = Reader(request_id), time.monotonic() + 150
        for turn, name in enumerate(itertools.cycle(GATEWAYS)):
            url = self._gateways[name].url if turn else url
            if time.monotonic() > give_up:
                self._seen.seams.append(f"{request_id}: no outcome in time")
                return
            try:
                headers = {"Last-Event-ID": reader.cursor} if reader.cursor else {}
                path = f"{url}/v1/requests/{request_id}/events"
                async with self._session.get(path, headers=headers) as answer:
                    if answer.status == 200:
                        self._seen.resumed += turn > 0
                        async for line in answer.content:
                            reader.take(line.decode().rstrip())
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                pass  # it was killed
            if reader.fault is not None:
                self._seen.seams.append(reader.fault)
            if reader.ended or reader.fault is not None:
                return
            await asyncio.sleep(0.1)

    async def chat(self, url: str) -> None:
        body = {"model": "quick", "messages": [{"role": "user", "content": "hi"}]}
        await self._http("chat", "POST", f"{url}/v1/chat/completions", json=body)

    async def chat_stream(self, url: str) -> None:
        body = {"model": "slow", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
        await self._http("chat stream", "POST", f"{url}/v1/chat/completions", json=body)

    async def embed(self, url: str) -> None:
        await self._http("embed", "POST", f"{url}/v1/embeddings", json={"model": "embed", "input": ["a", "b"]})

    async def idempotent(self, url: str) -> None:
        body = {"task": "text_generation", "payload": {"prompt": "hi"}, "model": "quick"}
        headers = {"Idempotency-Key": f"key-{random.randrange(500)}"}
        await self._http("idempotent", "POST", f"{url}/v1/requests", json=body, headers=headers)

    async def cancel(self, url: str) -> None:
        request_id = await self._submit(url, model="slow")
        if request_id:
            await self._http("cancel", "POST", f"{url}/v1/requests/{request_id}/cancel")

    async def lists(self, url: str) -> None:
        for path in ("requests?limit=20", "requests?status=completed", "models", "stats", "conversations"):
            await self._http(path.split("?")[0], "GET", f"{url}/v1/{path}")

    async def turn(self, url: str) -> None:
        payload = {"messages": [{"role": "user", "content": "hi"}]}
        await self._submit(url, conversation_id=f"c{random.randrange(20)}", payload=payload)

    async def socket(self, url: str) -> None:
        async with self._session.ws_connect(f"{url}/v1/ws", protocols=("penstock.v1",)) as socket:
            request = {"task": "text_generation", "model": "slow", "stream": True, "payload": {"prompt": "hi"}}
            await socket.send_json({"type": "submit", "request": request})
            async for message in socket:
                frame = json.loads(message.data)
                if frame["type"] == "accepted":
                    self._seen.accepted.append(frame["request_id"])
                if frame["type"] == "error":
                    status = 503 if frame["error"]["retryable"] else 500
                    self._seen.note("socket", status, ["retry-after"], message.data.encode())
                if frame["type"] in ("result", "error"):
                    break
            self._seen.answers[f"socket closed {socket.close_code}"] += 1

    def kinds(self) -> list[Callable[[str], Awaitable[None]]]:
        named = (self.poll, self.follow, self.resume, self.chat, self.chat_stream, self.embed, self.idempotent)
        return [*named, self.cancel, self.lists, self.turn, self.socket]


async def load(gateways: dict[str, Process], seen: Seen, seconds: float) -> None:
    """Exchanges at a steady rate, by turns with each gateway, whatever becomes of them."""
    timeout = aiohttp.ClientTimeout(total=180)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        clients = Clients(session, seen, gateways)

        async def one(name: str, kind: Callable[[str], Awaitable[None]]) -> None:
            try:
                await kind(gateways[name].url)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                seen.broken[f"{name} {type(error).__name__}"] += 1

        tasks: set[asyncio.Task[None]] = set()
        began, number = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            kinds = clients.kinds()
            task = asyncio.create_task(
                one(GATEWAYS[number % len(GATEWAYS)], kinds[(number // len(GATEWAYS)) % len(kinds)])
            )
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
            await asyncio.sleep(max(0.0, began + number / RATE - time.monotonic()))
        await asyncio.gather(*tasks)


async def disturb(
    whole: System,
    kafka: Any,
    processes: dict[str, Process],
    seconds: float,
    faults: Counter[str],
    chance: random.Random,
) -> None:
    """A fault every twenty seconds, the last one early enough to recover from."""
    give_up = time.monotonic() + seconds - FAULT_EVERY_S
    while time.monotonic() < give_up:
        await asyncio.sleep(FAULT_EVERY_S)
        kind = chance.choice(["worker", "two gateways", "two gateways", "gateway stops", "broker stands still"])
        faults[kind] += 1
        if kind == "worker":
            await asyncio.to_thread(processes["w1"].kill9)
            processes["w1"] = whole.worker("w1")
        elif kind == "two gateways":
            for name in (killed := chance.sample(GATEWAYS[1:], 2)):
                await asyncio.to_thread(processes[name].kill9)
            for name in killed:
                processes[name] = gateway(whole, name, port=processes[name].port)
        elif kind == "gateway stops":
            await asyncio.to_thread(processes["g2"].stop)
            processes["g2"] = gateway(whole, "g2", port=processes["g2"].port)
        else:
            kafka.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(2, 12))
            kafka.process.send_signal(signal.SIGCONT)
        print(f"{give_up + FAULT_EVERY_S - time.monotonic():.0f} s left, {dict(faults)}", file=sys.stderr, flush=True)


def gateway(whole: System, name: str, port: int | None = None) -> Process:
    return whole.gateway(name, port=port, env={"PENSTOCK_GATEWAY__RECENT_BYTES": str(RECENT_BYTES)})


def sizes(process: Process) -> dict[str, int]:
    """Raises AssertionError with its last words if it has ended."""
    assert process.alive(), f"{process.name} exited with {process.popen.returncode}:\n{process.tail()}"
    about = psutil.Process(process.popen.pid)
    return {
        "threads": about.num_threads(),
        "descriptors": about.num_fds(),
        "mib": about.memory_full_info().uss // 2**20,
    }


async def without_outcome(url: str, ids: list[str], deadline_s: float) -> list[str]:
    """Accepted requests that the gateway does not call done at the deadline."""
    give_up, left = time.monotonic() + deadline_s, list(ids)
    async with aiohttp.ClientSession() as session:
        while left and time.monotonic() < give_up:
            request_id = left[-1]
            async with session.get(f"{url}/v1/requests/{request_id}", params={"wait": 5}) as answer:
                if answer.status == 200 and (await answer.json())["done"]:
                    left.pop()
                    continue
            await asyncio.sleep(0.2)
    return left


async def still_under_way(url: str, deadline_s: float) -> float:
    """How many requests the gateway counts as accepted and not done, once that does not fall any more."""
    give_up, count = time.monotonic() + deadline_s, 1.0
    async with aiohttp.ClientSession() as session:
        while count and time.monotonic() < give_up:
            async with session.get(f"{url}/metrics") as answer:
                found = re.search(r"^penstock_inflight (\S+)$", await answer.text(), re.MULTILINE)
            count = float(found[1]) if found else -1.0
            await asyncio.sleep(0.2)
    return count


async def soak(whole: System, kafka: Any, seconds: float, seed: int) -> dict[str, Any]:
    processes = {
        "w1": whole.worker("w1"),
        "w2": whole.worker("w2"),
        **{name: gateway(whole, name) for name in GATEWAYS},
    }
    for process in processes.values():
        process.wait_ready()
    seen, faults = Seen(), Counter[str]()
    loading = asyncio.create_task(load(processes, seen, seconds))
    faulting = asyncio.create_task(disturb(whole, kafka, processes, seconds, faults, random.Random(seed)))
    await asyncio.sleep(seconds / 5)
    early = {name: sizes(processes[name]) for name in LIVE}
    await asyncio.gather(loading, faulting)
    lost = await without_outcome(processes["g1"].url, seen.accepted, 180)
    late = {name: sizes(processes[name]) for name in LIVE}
    for name in GATEWAYS:
        processes[name].wait_ready()
    under_way = {name: await still_under_way(processes[name].url, 30) for name in GATEWAYS}
    return {
        "answers": dict(sorted(seen.answers.items())),
        "wrong": len(seen.wrong),
        "wrong_examples": seen.wrong[:10],
        "broken": dict(seen.broken),
        "accepted": len(seen.accepted),
        "without_outcome": len(lost),
        "resumed": seen.resumed,
        "seams": seen.seams,
        "counted_as_under_way": {name: count for name, count in under_way.items() if count},
        "early": early,
        "late": late,
        "grown": [
            f"{of} {name}" for of in LIVE for name, most in GROWTH.items() if late[of][name] > early[of][name] + most
        ],
        "g1_alive": processes["g1"].alive(),
        "faults": dict(faults),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="not used: one round is the whole soak")
    parser.add_argument("--quick", action="store_true", help="two minutes")
    arguments = parser.parse_args()
    seconds = 120.0 if arguments.quick else 60 * arguments.minutes
    options = {"session_timeout_s": 6, "heartbeat_s": 1}
    with tempfile.TemporaryDirectory(prefix="penstock-soak-") as folder:
        kafka = EmbeddedKafka(Path(folder), free_port())
        kafka.start()
        try:
            with system(kafka.bootstrap_servers, models=[QUICK, SLOW, LONG, EMBED], worker_options=options) as whole:
                result = asyncio.run(soak(whole, kafka, seconds, arguments.seed))
                print(json.dumps({"gateway_soak": result, "seconds": round(seconds)}, indent=1))
        finally:
            kafka.kill()
    bad = ("wrong", "without_outcome", "grown", "seams", "counted_as_under_way")
    if any(result[name] for name in bad) or not result["g1_alive"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
