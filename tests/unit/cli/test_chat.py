"""chat over a WebSocket, against a scripted gateway: it is dialled first, and waits when it is busy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pytest
from typer.testing import CliRunner
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from penstock.cli.main import app
from penstock.cli.paths import free_port

Reply = Callable[[ServerConnection], None]


@dataclass
class Scripted:
    """A gateway's socket: `refusals` of the handshake (status, Retry-After), then a reply for each frame."""

    refusals: list[tuple[HTTPStatus, str]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    frames: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0

    def handshake(self, connection: ServerConnection, request: Request) -> Response | None:
        if not self.refusals:
            return None
        status, after = self.refusals.pop(0)
        answer = connection.respond(status, json.dumps({"error": {"message": f"said {status.value}"}}))
        answer.headers["retry-after"] = after
        return answer

    def talk(self, connection: ServerConnection) -> None:
        for text in connection:
            self.frames.append(json.loads(text))
            self.replies.pop(0)(connection)


@pytest.fixture
def gateway() -> Iterator[Scripted]:
    made = Scripted()
    subprotocols: Any = ["penstock.v1"]
    with serve(
        made.talk, "127.0.0.1", 0, subprotocols=subprotocols, process_request=made.handshake, close_timeout=1
    ) as server:
        made.port = server.socket.getsockname()[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield made
        server.shutdown()
        thread.join(10)


def frames(*bodies: dict[str, Any], then: str = "") -> Reply:
    def reply(connection: ServerConnection) -> None:
        for body in bodies:
            connection.send(json.dumps(body))
        if then == "drop":
            connection.close(1012)

    return reply


LIMIT = {
    "type": "error",
    "request_id": None,
    "error": {"message": "this key may submit 1 requests per second", "code": "tenant_limit", "retryable": True},
}
ACCEPTED = {"type": "accepted", "request_id": "r"}
ANSWER = [
    {"type": "chunk", "request_id": "r", "text": "Hi.", "cursor": "c1"},
    {"type": "result", "request_id": "r", "status": "completed", "error": None, "cursor": "c2"},
]


def chat(port: int, said: str = "hello\n") -> Any:
    return CliRunner().invoke(app, ["chat", "--url", f"http://127.0.0.1:{port}"], input=said)


def test_without_a_gateway_it_fails_before_anything_is_typed() -> None:
    done = chat(free_port(), said="")
    assert done.exit_code == 3
    assert "penstock up" in done.stderr


def test_a_refusal_is_told_as_the_gateway_says_it(gateway: Scripted) -> None:
    gateway.refusals = [(HTTPStatus.UNAUTHORIZED, "0")]
    done = chat(gateway.port)
    assert (done.exit_code, done.stderr) == (1, "penstock: said 401\n")


def test_a_limit_is_waited_out_and_said(gateway: Scripted) -> None:
    gateway.refusals = [(HTTPStatus.TOO_MANY_REQUESTS, "0")]
    limit = {**LIMIT, "error": {**LIMIT["error"], "details": {"retry_after_s": 0.1}}}  # type: ignore[dict-item]
    gateway.replies = [frames(limit), frames(ACCEPTED, *ANSWER)]
    done = chat(gateway.port)
    assert (done.exit_code, "Hi." in done.stdout) == (0, True), done.output
    assert "(said 429; asking again in 1 s)" in done.stderr
    assert "(this key may submit 1 requests per second; asking again in 1 s)" in done.stderr
    first, second = gateway.frames
    assert first == second


def test_a_turn_whose_fate_is_not_known_is_asked_again_with_its_key(gateway: Scripted) -> None:
    gateway.replies = [frames(then="drop"), frames(ACCEPTED, ANSWER[0], then="drop"), frames(ANSWER[1])]
    done = chat(gateway.port)
    assert (done.exit_code, "Hi." in done.stdout) == (0, True), done.output
    submitted, again, resumed = gateway.frames
    assert submitted["idempotency_key"]
    assert again == submitted
    assert (resumed["type"], resumed["request_id"], resumed["after"]) == ("subscribe", "r", "c1")


def test_what_is_wrong_ends_a_chat_that_is_piped(gateway: Scripted) -> None:
    error = {"message": "the model is unknown", "code": "model_not_found", "retryable": False}
    gateway.replies = [frames({"type": "error", "request_id": None, "error": error})]
    done = chat(gateway.port)
    assert (done.exit_code, "the model is unknown" in done.stderr) == (1, True)
