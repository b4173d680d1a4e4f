"""Workers and gateways are stopped and started again one after another, under load: no call fails.

A client does what the documents say: native ones reconnect with their cursor; the stock OpenAI client stands behind a
proxy that passes over a gateway that refuses the connection.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.cli.paths import free_port
from support import wait_until
from system import Process, System, running

WORDS = 40
"""4 s: longer than the workers' drain, shorter than the gateways'."""
WHOLE = "".join(f"word{number} " for number in range(WORDS))
MODEL = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": WORDS, "delay_ms": 100, "slots": 64},
}
NATIVE = {"task": "text_generation", "stream": True, "payload": {"prompt": "go", "max_tokens": WORDS}}
COME_AGAIN = (1012, 1013)
"""The gateway stops, or is behind the topics because it has just started."""
PATIENCE_S = 60.0


class Proxy(httpx.BaseTransport):
    """Stands for a load balancer: who refuses a connection is passed over."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = [httpx.URL(url) for url in urls]
        self._next = 0
        self._inner = httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=0))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for _ in self._urls:
            self._next += 1
            url = self._urls[self._next % len(self._urls)]
            request.url = request.url.copy_with(host=url.host, port=url.port)
            try:
                return self._inner.handle_request(request)
            except httpx.ConnectError as refused:
                last = refused
        raise last


class Load:
    """Clients of each kind that call until they are told to stop; a failure ends its client and is found by `end`."""

    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(16)
        self.done: dict[str, int] = {}
        self.reconnects = 0
        kinds = (self._native_stream, self._socket, self._chat_stream, self._chat)
        self._clients: list[Future[None]] = [
            self._pool.submit(self._repeat, kind, number) for kind in kinds for number in range(3)
        ]

    def _repeat(self, call: Callable[[int], str], number: int) -> None:
        name = call.__name__
        while not self._over.is_set():
            assert call(number) == WHOLE, name
            self.done[name] = self.done.get(name, 0) + 1
            number += 1

    def rounds(self) -> int:
        for client in self._clients:
            if client.done():
                client.result()
        return min(self.done.get(kind, 0) for kind in ("_native_stream", "_socket", "_chat_stream", "_chat"))

    def end(self) -> None:
        self._over.set()
        for client in self._clients:
            client.result(PATIENCE_S)
        self._pool.shutdown()

    def _openai(self) -> openai.OpenAI:
        http = httpx.Client(transport=Proxy(self._urls), timeout=PATIENCE_S)
        return openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)

    def _chat(self, number: int) -> str:
        with self._openai() as client:
            messages: Any = [{"role": "user", "content": f"go {number}"}]
            answer = client.chat.completions.create(model="noop", messages=messages, max_tokens=WORDS)
            return answer.choices[0].message.content or ""

    def _chat_stream(self, number: int) -> str:
        with self._openai() as client:
            messages: Any = [{"role": "user", "content": f"go {number}"}]
            stream = client.chat.completions.create(model="noop", messages=messages, max_tokens=WORDS, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    def _native_stream(self, number: int) -> str:
        with httpx.Client(transport=Proxy(self._urls), base_url="http://127.0.0.1", timeout=PATIENCE_S) as http:
            key = {"idempotency-key": uuid.uuid4().hex}
            while (accepted := http.post("/v1/requests", json=NATIVE, headers=key)).status_code == 503:
                self.reconnects += 1
            text, cursor = "", None
            while True:
                for frame in self._events(http, accepted.raise_for_status().json()["events_url"], cursor):
                    cursor = frame["cursor"] or cursor
                    if frame["type"] == "chunk":
                        text += frame["text"]
                    elif frame["type"] == "result":
                        assert frame["status"] == "completed", frame
                        return text
                    assert frame["type"] not in ("restarted", "snapshot"), frame
                self.reconnects += 1

    def _events(self, http: httpx.Client, url: str, cursor: str | None) -> Iterator[dict[str, Any]]:
        headers = {"last-event-id": cursor} if cursor else {}
        try:
            with http.stream("GET", url, headers=headers) as stream:
                if stream.status_code == 503:
                    return
                stream.raise_for_status()
                for line in stream.iter_lines():
                    if line.startswith("data:"):
                        yield json.loads(line[5:])
        except httpx.RemoteProtocolError:
            return

    def _socket(self, number: int) -> str:
        text, request_id, cursor = "", None, None
        while True:
            try:
                url = self._urls[number % len(self._urls)].replace("http", "ws") + "/v1/ws"
                number += 1
                with connect(url) as socket:
                    if request_id is None:
                        socket.send(json.dumps({"type": "submit", "request": NATIVE}))
                    else:
                        socket.send(json.dumps({"type": "subscribe", "request_id": request_id, "after": cursor}))
                    while True:
                        frame = json.loads(socket.recv(PATIENCE_S))
                        request_id, cursor = frame.get("request_id") or request_id, frame.get("cursor") or cursor
                        assert frame["type"] not in ("restarted", "snapshot", "error"), frame
                        text += frame["text"] if frame["type"] == "chunk" else ""
                        if frame["type"] == "result":
                            assert frame["status"] == "completed", frame
                            return text
            except ConnectionClosed as closed:
                if closed.rcvd is None or closed.rcvd.code not in COME_AGAIN:
                    raise
            except ConnectionRefusedError:
                pass
            self.reconnects += 1


@pytest.fixture
def make_system(kafka: Any, kafka_prefix: str, tmp_path: Path) -> Iterator[Callable[..., System]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            running(System(kafka.bootstrap_servers, kafka_prefix, tmp_path / "system", **options))
        )


@pytest.mark.slow
def test_no_call_fails_in_a_rolling_restart(make_system: Callable[..., System]) -> None:
    system = make_system(models=[MODEL], worker_options={"drain_s": 1})
    ports = {"g1": free_port(), "g2": free_port()}
    parts: dict[str, Process] = {name: system.gateway(name, port=port) for name, port in ports.items()}
    parts |= {name: system.worker(name) for name in ("w1", "w2")}
    for part in parts.values():
        part.wait_ready()
    load = Load([parts["g1"].url, parts["g2"].url])
    try:
        for name in ("w1", "g1", "w2", "g2"):
            rounds = load.rounds()
            wait_until(lambda rounds=rounds: load.rounds() > rounds, PATIENCE_S, lambda: f"{load.done}")
            assert parts[name].stop() == 0, parts[name].tail()
            parts[name] = system.gateway(name, port=ports[name]) if name in ports else system.worker(name)
            parts[name].wait_ready()
    finally:
        load.end()
    assert load.reconnects > 0
    outcomes = system.outcomes()
    assert {event.status for event in outcomes.values()} == {"completed"}
    assert any(event.since is not None for event in outcomes.values()), "no run was handed to the other worker"
