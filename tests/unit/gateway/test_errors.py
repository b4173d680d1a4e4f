"""Errors: one shape, the headers that clients act on, and no prompt in a response or a log."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway_parts import edge_of
from kit.gateway_http import client, exchange, gateway_app, gateway_context
from penstock.gateway.edge.edge import Edge
from penstock.gateway.edge.errors import FinalFailure, outcome_error, refuse_socket
from penstock.gateway.edge.validation import validated
from penstock.gateway.routes.commands import PriorityBody
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

FIELDS = {"message", "type", "code", "param", "request_id", "retryable", "details"}
FINAL = {"x-should-retry": "false"}


async def get(error: Exception) -> httpx.Response:
    """The response of an app whose only route raises this error."""
    app = gateway_app()

    @app.get("/")
    async def _fail() -> None:
        raise error

    async with client(app) as http:
        return await http.get("/")


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (Overloaded("full", retry_after_s=1.2), 503, {"retry-after": "2"}),
        (TenantLimit("slow down"), 429, {"retry-after": "1"}),
        (Cancelled("gone"), 409, FINAL),
        (Unauthenticated("who?"), 401, {"www-authenticate": "Bearer", **FINAL}),
        (InsufficientCapacity("no", details={"need": 9, "capacity": 3}), 422, FINAL),
        (InvalidRequest("there is no field \ud800", param="\ud800"), 400, FINAL),
    ],
)
async def test_typed_errors(error: Any, status: int, headers: dict[str, str]) -> None:
    answer = await get(error)
    body = answer.json()["error"]
    param = error.param and error.param.replace("\ud800", "\ufffd")
    assert (answer.status_code, body["param"], set(body)) == (status, param, FIELDS)
    names = {"retry-after", "www-authenticate", "x-should-retry"}
    assert {name: value for name, value in answer.headers.items() if name in names} == headers
    assert answer.headers["x-request-id"].startswith("edge-")


async def test_a_final_failure_is_never_retried_even_if_its_error_could_be() -> None:
    answer = await get(FinalFailure(Overloaded("the remote engine is full"), "r1"))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false")
    assert "retry-after" not in answer.headers
    assert answer.headers["x-request-id"] == answer.json()["error"]["request_id"] == "r1"


async def test_the_text_of_an_unknown_exception_is_neither_sent_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        answer = await get(RuntimeError("a secret prompt"))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], set(error)) == (500, "internal", FIELDS)
    assert "secret" not in answer.text + caplog.text
    assert error["details"]["incident"] in caplog.text
    assert "RuntimeError" in caplog.text


def test_a_field_with_a_check_of_our_own_says_what_it_must_be() -> None:
    with pytest.raises(InvalidRequest) as refused:
        validated(PriorityBody, {"priority": 1_001})
    assert refused.value.message == "priority: must be 0 to 1000, or high, medium or low"


@pytest.mark.parametrize(
    ("status", "code", "message", "kind", "details"),
    [
        ("failed", "engine_failed", "died", EngineFailed, {}),
        ("failed", "of_tomorrow", "?", InternalError, {"code": "of_tomorrow"}),
        ("failed", None, None, EngineFailed, {}),
        ("cancelled", "cancelled", "by you", Cancelled, {}),
        ("vanished", None, None, InternalError, {}),
    ],
)
def test_the_error_of_an_outcome_is_typed(
    status: str, code: str | None, message: str | None, kind: Any, details: dict[str, str]
) -> None:
    error = outcome_error(status, None if code is None else {"code": code, "message": message})
    assert type(error) is kind
    assert message is None or (error.message, error.details or {}) == (message, details)


def socket_scope(path: str, **fields: Any) -> dict[str, Any]:
    return {"type": "websocket", "path": path, "headers": [(b"host", b"localhost")], **fields}


async def connects() -> Message:
    return {"type": "websocket.connect"}


@pytest.mark.parametrize("before", [[], ["websocket.accept"]])
async def test_a_socket_that_fails_is_closed_with_1011(before: list[str]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for kind in before:
            await send({"type": kind})
        raise RuntimeError("secret")

    sent = await exchange(Edge(app, app, edge_of(gateway_context())), socket_scope("/v1/ws"), connects)
    assert [message["type"] for message in sent] == ["websocket.accept", "websocket.close"]
    assert sent[-1]["code"] == 1011


async def test_a_refused_socket_confirms_the_subprotocol_so_that_browsers_see_the_code() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await refuse_socket(Unauthenticated("no"), scope, receive, send, close_code=4401)

    accepted, closed = await exchange(app, socket_scope("/", subprotocols=["penstock.v1"]), connects)
    assert (accepted["subprotocol"], closed["code"]) == ("penstock.v1", 4401)
