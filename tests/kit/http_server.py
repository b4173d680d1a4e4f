"""A server of HTTP in this process: a function answers each call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from support import in_background


class Call(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]
    """By lower-case names."""
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]
"""Status, content and headers. Content: bytes, an iterator of bytes that are sent as they come, or a JSON value."""


class HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer: Callable[[Call], Answer], port: int = 0) -> None:
        self.answer = answer
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HttpServer

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, content, *more = self.server.answer(Call(self.command, self.path, headers, body))
        if not isinstance(content, (bytes, Iterator)):
            content = json.dumps(content).encode()
        with suppress(OSError):  # its client has gone
            self.send_response(status)
            for name, value in (more[0] if more else {"content-type": "application/json"}).items():
                self.send_header(name, value)
            if isinstance(content, bytes):
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            for piece in [content] if isinstance(content, bytes) else content:
                self.wfile.write(piece)
                self.wfile.flush()

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextmanager
def serving_http(answer: Callable[[Call], Answer], port: int = 0) -> Iterator[HttpServer]:
    server = HttpServer(answer, port)
    with in_background(server):
        yield server
