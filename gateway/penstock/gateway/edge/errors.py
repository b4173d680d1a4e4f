"""Errors at the edge: every failure leaves in the one JSON shape, with the headers that clients act on."""

from __future__ import annotations

import json
import logging
import math
import traceback
import uuid
from collections.abc import Mapping
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.edge.validation import invalid_from_validation
from penstock.schemas.errors import (
    ERRORS_BY_CODE,
    Cancelled,
    DeadLettered,
    EngineFailed,
    Expired,
    InternalError,
    InvalidRequest,
    PenstockError,
    error_body,
)
from penstock.schemas.registry import MEDIA_TYPE

logger = logging.getLogger(__name__)

CLOSE_UNAUTHENTICATED = 4401
CLOSE_FORBIDDEN = 4403
CLOSE_OVERLOADED = 1013
CLOSE_INTERNAL = 1011

REGISTRY_PATH = "/registry/"

_CODES_BY_STATUS = {400: "invalid", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}


class FinalFailure(Exception):
    """The outcome of a request is a failure: asking again with the same request gives the same."""

    def __init__(self, error: PenstockError, request_id: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.request_id = request_id


class EdgeRefusal(HTTPException):
    """A PenstockError raised where a framework turns every exception but HTTPException into something else."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(error.http_status, error.message)
        self.error = error


def outcome_error(status: str, error: Mapping[str, Any] | None) -> PenstockError:
    """The typed error of a terminal status other than completed, from the error part of its frame."""
    facts: Mapping[str, Any] = error or {}
    message = facts.get("message")
    plain: dict[str, tuple[type[PenstockError], str]] = {
        "cancelled": (Cancelled, "the request was cancelled"),
        "expired": (Expired, "the request was not finished before its deadline"),
        "dead_lettered": (DeadLettered, "the request was put aside after too many attempts"),
        "failed": (EngineFailed, "the request failed"),
    }
    kind, text = plain.get(status, (InternalError, f"the request ended as {status}"))
    details = cast("dict[str, Any] | None", facts.get("details"))
    code = facts.get("code")
    if status == "failed" and code is not None:
        kind = ERRORS_BY_CODE.get(str(code), InternalError)
        if kind.code != code:
            details = {**(details or {}), "code": code}
    return kind(str(message or text), param=facts.get("param"), details=details)


def error_response(error: PenstockError, *, request_id: str | None = None, final: bool = False) -> JSONResponse:
    """The answer for an error. `final`: the request has had its one outcome, so a retry cannot help."""
    headers = error_headers(error, request_id=request_id, final=final)
    return ErrorResponse(error_body(error, request_id), error.http_status, headers=headers)


class ErrorResponse(JSONResponse):
    """An error may name what the caller sent, and half a surrogate pair is text that only JSON's escapes can carry.

    On the paths of the schema registry it has the shape that a registry's clients parse.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if f"{scope['path']}/".startswith(REGISTRY_PATH):
            told = {"error_code": self.status_code, "message": json.loads(self.body)["error"]["message"]}
            self.body = self.render(told)
            self.headers["content-type"] = MEDIA_TYPE
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)

    def render(self, content: Any) -> bytes:
        try:
            return super().render(content)
        except UnicodeEncodeError:
            return json.dumps(content, separators=(",", ":")).encode()


def error_headers(error: PenstockError, *, request_id: str | None = None, final: bool = False) -> dict[str, str]:
    """`x-request-id`, `Retry-After` and `x-should-retry`, by which the OpenAI clients decide."""
    headers = {"x-request-id": request_id or f"edge-{uuid.uuid4().hex[:16]}"}
    retryable = error.retryable and not final
    if retryable and error.http_status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    if not retryable:
        # Left to themselves they retry every 409, 429 and 5xx, and each retry would be a new request.
        headers["x-should-retry"] = "false"
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers


def install_error_handlers(app: FastAPI) -> None:
    """Every exception that a route lets out gets the one shape. The edge catches what none of these names."""
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(FinalFailure, _on_final_failure)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ValidationError, _on_internal_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


def log_unexpected(error: BaseException, path: str) -> str:
    """Log where an unknown exception came from and return the incident id for the caller.

    The log gets its type and place but not its text, which may quote a prompt.
    """
    incident = uuid.uuid4().hex[:12]
    places = "".join(traceback.format_tb(error.__traceback__))
    logger.error("edge.unexpected incident=%s path=%s type=%s\n%s", incident, path, type(error).__name__, places)
    return incident


async def refuse_socket(error: PenstockError, scope: Scope, receive: Receive, send: Send, *, close_code: int) -> None:
    """Close a WebSocket instead of the application."""
    # A close before the accept reaches browsers as a bare failure: only an accepted socket can say 4401.
    await receive()
    offered = scope.get("subprotocols") or []
    await send({"type": "websocket.accept", "subprotocol": offered[0] if offered else None})
    await send({"type": "websocket.close", "code": close_code, "reason": error.message[:120]})


def _known_request_id(request: Request) -> str | None:
    value = getattr(request.state, "request_id", None)
    return value if isinstance(value, str) else None


async def _on_penstock_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    return error_response(error, request_id=_known_request_id(request))


async def _on_final_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, FinalFailure)
    return error_response(error.error, request_id=error.request_id, final=True)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid_from_validation(error), request_id=_known_request_id(request))


async def _on_internal_error(request: Request, error: Exception) -> Response:
    incident = log_unexpected(error, request.url.path)
    failure = InternalError("internal error", details={"incident": incident})
    return error_response(failure, request_id=_known_request_id(request))


def _in_our_words(request: Request, error: HTTPException) -> str:
    """What the frameworks refuse by themselves, said as everything else is."""
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow") or (error.headers or {}).get("allow")
        return f"{request.method} is not allowed here" + (f"; {allowed} is" if allowed else "")
    return str(error.detail)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    request_id = _known_request_id(request)
    if isinstance(error, EdgeRefusal):
        return error_response(error.error, request_id=request_id)
    status = error.status_code
    if status < 400 or status in (204, 304):
        return Response(status_code=status, headers=error.headers)
    told = InvalidRequest(_in_our_words(request, error)) if status < 500 else InternalError("internal error")
    body = error_body(told, request_id)
    body["error"]["code"] = _CODES_BY_STATUS.get(status, "invalid" if status < 500 else "internal")
    headers = {"x-request-id": request_id or f"edge-{uuid.uuid4().hex[:16]}", **(error.headers or {})}
    return ErrorResponse(body, status, headers=headers)
