"""The command line in this process, and a gateway that answers from a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typer.testing import CliRunner, Result

from penstock.cli.main import app
from support import in_background

Json = dict[str, Any]


def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
    """`penstock` with these arguments."""
    return CliRunner().invoke(app, [*arguments], input=stdin)


class ScriptedGateway(ThreadingHTTPServer):
    """Answers each call, as `GET /v1/stats`, by the next answer of its script. The last answer is repeated.

    The script may name a call with its query or without. An answer is a JSON body, a pair of status and body, or a
    function that writes the response. A call that the script does not name gets 404.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, script: Json, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.play(script)

    def serve_forever(self, poll_interval: float = 0.01) -> None:
        super().serve_forever(poll_interval)

    def play(self, script: Json) -> None:
        """Starts this script and forgets earlier calls."""
        self.script = {call: [*answer] if isinstance(answer, list) else answer for call, answer in script.items()}
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.cursors: list[str | None] = []
        """The Last-Event-ID of each call."""

    def run(self, *arguments: str, stdin: str | bytes | None = None) -> Result:
        return invoke(*arguments, "--url", self.url, stdin=stdin)

    def answer(self, asked: str) -> Any:
        name = asked if asked in self.script else asked.partition("?")[0]
        answers = self.script.get(name, (404, {"error": {"message": asked, "code": "not_found"}}))
        if not isinstance(answers, list):
            return answers
        return answers.pop(0) if len(answers) > 1 else answers[0]


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedGateway  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        asked = f"{self.command} {self.path}"
        self.server.asked.append(asked)
        self.server.bodies.append(json.loads(body) if body else None)
        self.server.cursors.append(self.headers.get("last-event-id"))
        answer = self.server.answer(asked)
        if callable(answer):
            answer(self)
            return
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        data = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        return


@contextmanager
def scripted_gateway(script: Json | None = None, port: int = 0) -> Iterator[ScriptedGateway]:
    server = ScriptedGateway(script or {}, port)
    with in_background(server):
        yield server


def events(*frames: Json, then: str = "end") -> Callable[[BaseHTTPRequestHandler], None]:
    """An event stream of these frames. Then it ends, is `cut` off, or is held open (`hold`)."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for frame in frames:
            data = f"id: {frame.get('cursor')}\ndata: {json.dumps(frame, ensure_ascii=False)}\n\n".encode()
            handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        handler.wfile.flush()
        if then == "hold":
            handler.rfile.read(1)  # until the client closes the connection
        if then == "end":
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return answer
