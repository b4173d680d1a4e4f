"""Attempts that fail at a remote server run again until the deadline, unless a bound says otherwise."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from system import NOOP, System, eventually
from worker_requests import outcome, send, statuses

Make = Callable[..., System]


class Breakable(ThreadingHTTPServer):
    """An OpenAI-compatible server that answers with `status` until a test says 200. It counts what it was asked."""

    daemon_threads = True

    def __init__(self, status: int, port: int = 0) -> None:
        self.status = status
        self.asked: Counter[str] = Counter()
        super().__init__(("127.0.0.1", port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Breakable

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["content-length"])))["prompt"]
        self.server.asked[prompt] += 1
        status = self.server.status
        fine: dict[str, Any] = {"choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}]}
        data = json.dumps(fine if status == 200 else {"error": {"message": "broken"}}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serving(status: int, port: int = 0) -> Iterator[Breakable]:
    server = Breakable(status, port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def remote(port: int, **options: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    return {**NOOP, "engine": "remote", "source": url, "options": {"slots": 4, **options}}


def asks(request_id: str, **fields: Any) -> dict[str, Any]:
    return {"request_id": request_id, "payload": {"prompt": request_id}, **fields}


def test_a_server_that_answers_500_for_a_while_fails_only_what_has_a_bound(make_system: Make) -> None:
    with serving(500) as server:
        system = make_system(models=[remote(server.server_port)])
        worker = system.worker().wait_ready()
        send(system, asks("hour"), asks("twice", max_attempts=2), asks("second", ttl_ms=1_000))
        bounded, late = outcome(system, "twice"), outcome(system, "second", 30)
        eventually(lambda: server.asked["hour"] > 4, 30, worker.tail)
        assert "hour" not in system.outcomes()
        server.status = 200
        ended = outcome(system, "hour", 30)
    assert (ended.status, ended.error) == ("completed", None), worker.tail()
    for event in (bounded, late):
        assert event.error is not None
        assert (event.status, event.error.code) == ("dead_lettered", "engine_failed")
    assert server.asked["twice"] == 2
    assert sorted(json.loads(letter.original)["request_id"] for letter in system.dead_letters()) == ["second", "twice"]


def test_a_server_that_is_not_there_spends_no_attempt(make_system: Make) -> None:
    with serving(200) as server:
        port = server.server_port
    system = make_system(models=[remote(port, patience_s=0.1)])
    worker = system.worker().wait_ready()
    send(system, asks("r", max_attempts=1))
    eventually(lambda: "retrying" in statuses(system, "r"), 30, worker.tail)
    with serving(200, port):
        ended = outcome(system, "r", 30)
    assert (ended.status, ended.error) == ("completed", None), worker.tail()
