"""Errors: one shape, the headers clients act on, and nothing told or logged that might quote a prompt."""

from __future__ import annotations

import logging

import httpx
import pytest
from fastapi import FastAPI, Query
from starlette.types import Message, Receive, Scope, Send

from penstock.gateway.document.described_routes import TABLE
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.connections import Connections
from penstock.gateway.edge.edge import Edge, EdgeParts, install_edge
from penstock.gateway.edge.errors import (
    FinalFailure,
    error_headers,
    outcome_error,
    refuse_socket,
)
from penstock.gateway.limits.allowances import Allowances
from penstock.schemas.errors import (
    Cancelled,
    EngineFailed,
    InsufficientCapacity,
    InternalError,
    InvalidRequest,
    Overloaded,
    TenantLimit,
    Unauthenticated,
)


def edge_parts() -> EdgeParts:
    policy = AuthPolicy.build()
    connections = Connections(policy.still_good)
    return EdgeParts(routes=TABLE, policy=policy, allowances=Allowances(), connections=connections, bodies=BodyLimits())


FIELDS = {"message", "type", "code", "param", "request_id", "retryable", "details"}


def app_raising(error: Exception) -> FastAPI:
    app = FastAPI()
    install_edge(app, edge_parts())

    @app.get("/")
    async def _fail(number: int = Query(1, ge=1)) -> None:  # pyright: ignore[reportUnusedFunction]
        raise error

    return app


async def get(app: FastAPI, path: str = "/") -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        return await http.get(path)


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (Overloaded("full", retry_after_s=1.2), 503, {"retry-after": "2"}),
        (TenantLimit("slow down"), 429, {"retry-after": "1"}),
        (Unauthenticated("who?"), 401, {"www-authenticate": "Bearer", "x-should-retry": "false"}),
        (InsufficientCapacity("no", details={"need": 9, "capacity": 3}), 422, {"x-should-retry": "false"}),
    ],
)
async def test_typed_errors(error: Exception, status: int, headers: dict[str, str]) -> None:
    answer = await get(app_raising(error))
    assert answer.status_code == status
    assert set(answer.json()["error"]) == FIELDS
    assert headers.items() <= dict(answer.headers).items()
    assert answer.headers["x-request-id"].startswith("edge-")


async def test_a_final_failure_is_never_retried_even_if_its_error_could_be() -> None:
    answer = await get(app_raising(FinalFailure(Overloaded("the remote engine is full"), "r1")))
    assert answer.status_code == 503
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] == "r1"


async def test_an_error_may_name_text_that_cannot_be_encoded() -> None:
    answer = await get(app_raising(InvalidRequest("there is no field \ud800", param="\ud800")))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "\ud800"


async def test_an_unknown_exception_leaves_its_text_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = await get(app_raising(RuntimeError("a secret prompt")))
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["code"], set(error)) == ("internal", FIELDS)
    assert "secret" not in answer.text + caplog.text
    assert error["details"]["incident"] in caplog.text
    assert "RuntimeError" in caplog.text


async def test_validation_names_the_field() -> None:
    answer = await get(app_raising(ValueError()), "/?number=0")
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("invalid", "number")


@pytest.mark.parametrize(
    ("status", "facts", "kind", "code"),
    [
        ("failed", {"code": "engine_failed", "message": "died"}, EngineFailed, "engine_failed"),
        ("failed", {"code": "of_tomorrow", "message": "?"}, InternalError, "internal"),
        ("failed", None, EngineFailed, "engine_failed"),
        ("cancelled", {"code": "cancelled", "message": "by you"}, Cancelled, "cancelled"),
        ("vanished", None, InternalError, "internal"),
    ],
)
def test_outcomes_are_typed(status: str, facts: dict[str, object] | None, kind: type, code: str) -> None:
    error = outcome_error(status, facts)
    assert type(error) is kind
    assert error.code == code
    if facts is not None:
        assert error.message == facts["message"]
    if code == "internal" and facts:
        assert error.details == {"code": "of_tomorrow"}


def test_only_what_may_succeed_later_may_be_retried() -> None:
    assert "x-should-retry" not in error_headers(Overloaded("full"))
    assert error_headers(Cancelled("gone"))["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("before", "expected"),
    [([], ["websocket.accept", "websocket.close"]), (["websocket.accept"], ["websocket.accept", "websocket.close"])],
)
async def test_a_socket_that_fails_is_closed_with_1011(before: list[str], expected: list[str]) -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for kind in before:
            await send({"type": kind})
        raise RuntimeError("secret")

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "websocket", "path": "/v1/ws", "headers": [(b"host", b"localhost")]}
    await Edge(app, app, edge_parts())(scope, receive, send)
    assert [message["type"] for message in sent] == expected
    assert sent[-1]["code"] == 1011


async def test_a_refused_socket_confirms_the_subprotocol_so_that_browsers_see_the_code() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {"type": "websocket", "path": "/", "headers": [], "subprotocols": ["penstock.v1"]}
    await refuse_socket(Unauthenticated("no"), scope, receive, send, close_code=4401)
    assert sent[0]["subprotocol"] == "penstock.v1"
    assert sent[1]["code"] == 4401
