"""What stands outside of Penstock in a row: the model's server of others, and a receiver of webhooks."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.cli.faults.histories import History


class Outside(ThreadingHTTPServer):
    """One server on loopback for both. The model answers with its prompt."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, history: History) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.history = history
        self.refuses = threading.Event()
        """While it is set the model's server answers 500."""
        self.answers = threading.Event()
        """While it is not set the receiver lets its callers wait, and refuses them then."""
        self.answers.set()
        self.held = 0
        """Calls that waited so far."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Outside  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/hook":
            self._called(body)
        elif self.server.refuses.is_set():
            self._answer(500, {"error": {"message": "the fault table lets this attempt fail"}})
        else:
            self._answer(200, {"choices": [{"index": 0, "text": body["prompt"], "finish_reason": "stop"}]})

    def _called(self, body: dict[str, Any]) -> None:
        """A call that had to wait is refused and not noted: its caller may be gone, and each has to be made again."""
        if not self.server.answers.is_set():
            self.server.held += 1
            self.server.answers.wait()
            self._answer(503, {})
            return
        about = body["data"]
        self.server.history.note("webhook", about["request_id"], id=self.headers["webhook-id"], status=about["status"])
        self._answer(200, {})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # whoever asked is gone: that may be the row's fault

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def outside(history: History) -> Generator[Outside]:
    server = Outside(history)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.answers.set()
        server.shutdown()
        server.server_close()
