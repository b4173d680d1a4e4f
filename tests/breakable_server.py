"""An OpenAI-compatible server that tests break and mend, and the model that is served by it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support import in_background
from system import NOOP


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
    with in_background(server):
        yield server


def remote(port: int, **options: Any) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}"
    return {**NOOP, "engine": "remote", "source": url, "options": {"slots": 4, **options}}
