"""chat over a WebSocket: it connects first, waits for a busy gateway and resumes after a lost connection."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pytest
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from kit.cli import Json, invoke
from penstock.cli.paths import free_port

Reply = Callable[[ServerConnection], None]


@dataclass
class Scripted:
    """A gateway's socket: `refusals` of the handshake (status, Retry-After), then a reply for each frame."""

    refusals: list[tuple[HTTPStatus, str]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    frames: list[Json] = field(default_factory=list)
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
    options: Any = {"subprotocols": ["penstock.v1"], "process_request": made.handshake, "close_timeout": 1}
    with serve(made.talk, "127.0.0.1", 0, **options) as server:
        made.port = server.socket.getsockname()[1]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield made
        server.shutdown()
        thread.join(10)


def frames(*bodies: Json, then: str = "") -> Reply:
    def reply(connection: ServerConnection) -> None:
        for body in bodies:
            connection.send(json.dumps(body))
        if then == "drop":
            connection.close(1012)

    return reply


def limit(**details: Any) -> Json:
    error = {"message": "this key may submit 1 requests per second", "code": "tenant_limit", "retryable": True}
    return {"type": "error", "request_id": None, "error": {**error, "details": details}}


ACCEPTED = {"type": "accepted", "request_id": "r"}
ANSWER = [
    {"type": "chunk", "request_id": "r", "text": "Hi.", "cursor": "c1"},
    {"type": "result", "request_id": "r", "status": "completed", "error": None, "cursor": "c2"},
]


def chat(port: int, said: str = "hello\n") -> Any:
    return invoke("chat", "--url", f"http://127.0.0.1:{port}", stdin=said)


def test_without_a_gateway_it_fails_before_anything_is_typed() -> None:
    done = chat(free_port(), said="")
    assert done.exit_code == 3
    assert "penstock up" in done.stderr


REFUSED: Json = {
    "type": "error", "request_id": None,
    "error": {"message": "the model is unknown", "code": "model_not_found", "retryable": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("refusals", "replies", "said"),
    [([(HTTPStatus.UNAUTHORIZED, "0")], [], "said 401"), ([], [REFUSED], "the model is unknown")],
)
def test_a_refusal_ends_a_piped_chat(gateway: Scripted, refusals: Any, replies: list[Json], said: str) -> None:
    gateway.refusals, gateway.replies = [*refusals], [frames(*replies)]
    done = chat(gateway.port)
    assert (done.exit_code, f"penstock: {said}" in done.stderr) == (1, True), done.output


def test_a_limit_is_waited_out_and_shown(gateway: Scripted) -> None:
    gateway.refusals = [(HTTPStatus.TOO_MANY_REQUESTS, "0")]
    gateway.replies = [frames(limit(retry_after_s=0.1)), frames(ACCEPTED, *ANSWER)]
    done = chat(gateway.port)
    assert (done.exit_code, "Hi." in done.stdout) == (0, True), done.output
    assert "(said 429; asking again in 1 s)" in done.stderr
    assert "(this key may submit 1 requests per second; asking again in 1 s)" in done.stderr
    first, second = gateway.frames
    assert first == second


def test_a_turn_with_an_unknown_outcome_is_sent_again_with_its_key(gateway: Scripted) -> None:
    gateway.replies = [frames(then="drop"), frames(ACCEPTED, ANSWER[0], then="drop"), frames(ANSWER[1])]
    done = chat(gateway.port)
    assert (done.exit_code, "Hi." in done.stdout) == (0, True), done.output
    submitted, again, resumed = gateway.frames
    assert submitted["idempotency_key"]
    assert again == submitted
    assert (resumed["type"], resumed["request_id"], resumed["after"]) == ("subscribe", "r", "c1")
