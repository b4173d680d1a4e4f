"""watch and submit over HTTP, against a scripted gateway: a lost connection is resumed, a deadline is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.commands import following
from penstock.cli.main import app
from penstock.cli.paths import free_port
from support import wait_until

Answer = Callable[["Handler"], None]


class Scripted(ThreadingHTTPServer):
    """Answers each GET of a path by the next of its script, the last one again and again."""

    daemon_threads = True
    script: dict[str, list[Answer]]
    asked: list[tuple[str, str | None]]


class Handler(BaseHTTPRequestHandler):
    server: Scripted
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((path, self.headers.get("last-event-id")))
        answers = self.server.script[path]
        (answers.pop(0) if len(answers) > 1 else answers[0])(self)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", "0")))
        self.do_GET()

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.fixture
def gateway() -> Iterator[Scripted]:
    server = Scripted(("127.0.0.1", 0), Handler)
    server.script, server.asked = {}, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "AGAIN_S", 0.02)


def events(*frames: dict[str, Any], then: str = "end") -> Answer:
    """A stream of these frames; `then` it ends in order, is cut, or is held open."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        for frame in frames:
            data = f"id: {frame.get('cursor')}\ndata: {json.dumps(frame, ensure_ascii=False)}\n\n".encode()
            handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        handler.wfile.flush()
        if then == "hold":
            handler.rfile.read(1)  # until the client goes
        if then == "end":
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    return answer


def body(status: int, content: dict[str, Any] | None) -> Answer:
    def answer(handler: Handler) -> None:
        data = b"" if content is None else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    return answer


def chunk(text: str, cursor: str) -> dict[str, Any]:
    return {"type": "chunk", "text": text, "cursor": cursor}


RUNNING = {"type": "status", "status": "running", "done": False, "cursor": "c0"}
RESULT = {"type": "result", "status": "completed", "result": {"text": "one two"}, "error": None, "cursor": "c9"}
AWAY = body(503, {"error": {"message": "the gateway waits for its broker", "code": "broker_unavailable"}})


def run(gateway: Scripted, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--url", f"http://127.0.0.1:{gateway.server_port}"])


def test_watch_goes_on_where_it_was_when_the_gateway_was_away(gateway: Scripted) -> None:
    gateway.script["/v1/requests/r/events"] = [
        events(RUNNING, chunk("one", "c1"), then="cut"),
        AWAY,
        events({**RUNNING, "cursor": "c1"}, chunk(" two", "c2"), RESULT),
    ]
    done = run(gateway, "watch", "r")
    assert (done.exit_code, done.stdout) == (0, "one two"), done.output
    assert done.stderr.count("[running]") == 1
    assert [cursor for _, cursor in gateway.asked] == [None, "c1", "c1"]


def test_watch_of_one_that_has_ended_meanwhile_asks_for_its_outcome(gateway: Scripted) -> None:
    gateway.script["/v1/requests/r/events"] = [body(204, None)]
    gateway.script["/v1/requests/r"] = [body(200, {"status": "failed", "done": True, "error": {"message": "no luck"}})]
    done = run(gateway, "watch", "r", "--after", "c9")
    assert done.exit_code == 1
    assert "no luck" in done.stderr


def test_watch_of_a_gateway_that_never_answered_fails_at_once() -> None:
    done = CliRunner().invoke(app, ["watch", "r", "--url", f"http://127.0.0.1:{free_port()}"])
    assert done.exit_code == 3


def test_a_refusal_is_not_waited_out(gateway: Scripted) -> None:
    gateway.script["/v1/requests/r/events"] = [
        events(RUNNING, then="cut"),
        body(404, {"error": {"message": "there is no request r", "code": "not_found"}}),
    ]
    done = run(gateway, "watch", "r")
    assert (done.exit_code, "there is no request r" in done.stderr) == (1, True)


def test_a_separator_inside_a_text_is_no_end_of_line(gateway: Scripted) -> None:
    gateway.script["/v1/requests/r/events"] = [events(RUNNING, chunk("a\u2028b\x85c", "c1"), RESULT)]
    assert run(gateway, "watch", "r").stdout == "a\u2028b\x85c"


def test_submit_keeps_its_deadline_while_a_stream_is_silent(gateway: Scripted) -> None:
    gateway.script["/v1/requests"] = [body(202, {"request_id": "r", "status": "accepted"})]
    gateway.script["/v1/requests/r/events"] = [events(RUNNING, chunk("one", "c1"), then="hold")]
    began = time.monotonic()
    done = run(gateway, "submit", "hello", "--stream", "--timeout", "0.5")
    assert (done.exit_code, done.stdout) == (4, "one"), done.output
    assert (
        f"r is still running after 0.5 s; it goes on: `penstock watch r --url http://127.0.0.1:{gateway.server_port}`"
        in done.stderr
    )
    assert time.monotonic() - began < 20  # and not the 30 s of a silent connection


def test_submit_waits_for_a_gateway_that_restarts(gateway: Scripted) -> None:
    gateway.script["/v1/requests"] = [body(202, {"request_id": "r", "status": "accepted"})]
    gateway.script["/v1/requests/r"] = [
        body(200, {"status": "running", "done": False}),
        AWAY,
        body(200, {"status": "completed", "done": True, "result": {"text": "one two"}}),
    ]
    done = run(gateway, "submit", "hello")
    assert (done.exit_code, done.stdout) == (0, "one two\n"), done.output


@pytest.mark.parametrize(
    "arguments", [["hello"], ["hello", "--stream"], ["embed", "x"], ["caption", "http://127.0.0.1/x.png"]]
)
def test_ctrl_c_ends_the_wait_and_says_how_to_go_on(gateway: Scripted, arguments: list[str]) -> None:
    url = f"http://127.0.0.1:{gateway.server_port}"
    gateway.script["/v1/requests"] = [body(202, {"request_id": "r", "status": "accepted"})]
    gateway.script["/v1/requests/r"] = [body(200, {"status": "running", "done": False})]
    gateway.script["/v1/requests/r/events"] = [events(RUNNING, then="hold")]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "submit", *arguments, "--url", url],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: any(path.startswith("/v1/requests/r") for path, _ in gateway.asked), 60, "it waits")
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert f"\nstill running: penstock watch r --url {url}\n" in said
    assert said.endswith(f"penstock requests cancel r --url {url}\n")
    assert "Traceback" not in said


WAITS = {"status": "accepted", "done": False, "detail": "no worker is alive", "position": None}


def test_why_a_request_waits_is_said(gateway: Scripted) -> None:
    gateway.script["/v1/requests"] = [body(202, {"request_id": "r", "status": "accepted"})]
    waiting = body(200, WAITS)
    gateway.script["/v1/requests/r"] = [waiting, waiting, body(200, {**RESULT, "done": True})]
    done = run(gateway, "submit", "hello")
    assert (done.exit_code, done.stderr) == (0, "[accepted: no worker is alive]\n")
    gateway.script["/v1/requests/r"] = [waiting]
    gateway.script["/v1/requests/r/events"] = [events({**RUNNING, "status": "accepted"}, RUNNING, RESULT)]
    done = run(gateway, "watch", "r")
    assert done.stderr.splitlines()[:2] == ["[accepted: no worker is alive]", "[running]"]
