"""The edge: one ASGI class in front of the app. It asks who calls, what they may do now and how large their bodies are.

Its order: Host and Origin, preflights, public routes, the key and its scope, rates, the broker, slots, the body.
Whatever goes wrong behind it leaves in the one JSON shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.datastructures import Headers
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.edge.auth import PROBE_PATHS, AuthPolicy, is_public, needed_scope, ticket_of
from penstock.gateway.edge.bodies import Body, BodyLimits, bytes_per_s, declared_length, discard_body, too_large
from penstock.gateway.edge.connections import Connections
from penstock.gateway.edge.cors import Cors
from penstock.gateway.edge.disconnects import ClientGone, unless_gone
from penstock.gateway.edge.errors import (
    CLOSE_FORBIDDEN,
    CLOSE_INTERNAL,
    CLOSE_OVERLOADED,
    CLOSE_UNAUTHENTICATED,
    EdgeRefusal,
    error_response,
    install_error_handlers,
    log_unexpected,
    refuse,
)
from penstock.gateway.edge.exchanges import Answer, empty_body, unless_set
from penstock.gateway.edge.tickets import mask_access_logs
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.schemas.errors import Forbidden, InternalError, Overloaded, PenstockError, TenantLimit, Unauthenticated

PUBLIC_BODY_BYTES = 64 * 1024
PUBLIC_BODY_S = 5.0
_WAITING_POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/images/")


def _nothing_awaited() -> PenstockError | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeParts:
    """What the edge asks. `awaited` names why nobody can be served yet, or None."""

    policy: AuthPolicy
    allowances: Allowances
    connections: Connections
    bodies: BodyLimits
    awaited: Callable[[], PenstockError | None] = _nothing_awaited


def install_edge(app: FastAPI, parts: EdgeParts, first: Callable[[ASGIApp], ASGIApp] | None = None) -> None:
    """Set up the edge and the error handlers of an app. Call it once. `first` is asked before the app's router."""
    install_error_handlers(app)
    mask_access_logs()

    def stack() -> ASGIApp:
        # The framework's own outer layers (errors, telemetry, body limits) are what the edge does itself.
        handlers = dict(app.exception_handlers)
        router: ASGIApp = AsyncExitStackMiddleware(app.router)
        return Edge(ExceptionMiddleware(router if first is None else first(router), handlers=handlers), parts)

    app.build_middleware_stack = stack


class Edge:
    """Outermost: sees every HTTP exchange and every WebSocket."""

    def __init__(self, app: ASGIApp, parts: EdgeParts) -> None:
        self._app = app
        self._parts = parts
        self._policy = parts.policy
        self._allowances = parts.allowances
        self._cors = Cors(parts.policy.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._websocket(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    # -- HTTP

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        answer = Answer(send, self._cors.headers(headers))
        try:
            await self._serve(scope, headers, receive, answer)
        except (ClientGone, ClientDisconnect):
            return
        except asyncio.CancelledError:
            # The time that open exchanges have at a stop is over: the server would say a bare 500.
            if not answer.started:
                await error_response(_restarts(scope))(scope, receive, answer)
            raise
        except (PenstockError, EdgeRefusal) as raised:
            error = raised.error if isinstance(raised, EdgeRefusal) else raised
            if answer.started:
                return  # the broken connection says it
            if isinstance(error, TenantLimit):
                await self._hold_back(scope)
            await error_response(error)(scope, receive, answer)
        except Exception as error:
            incident = log_unexpected(error, scope["path"])
            if not answer.started:
                failure = InternalError("internal error", details={"incident": incident})
                await error_response(failure)(scope, receive, answer)

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, answer: Answer) -> None:
        path: str = scope["path"]
        if path in PROBE_PATHS:  # orchestrators ask under any name, and hear nothing worth stealing
            await self._app(scope, receive, answer)
            return
        self._policy.check_host(headers.get("host", ""))
        self._policy.check_origin(headers.get("origin"), headers.get("host", ""))
        preflight = self._cors.preflight(scope["method"], headers)
        if preflight is not None:
            await preflight(scope, receive, answer)
        elif is_public(path):
            client = scope.get("client")
            address = client[0] if client else ""
            self._allowances.public_call(address)
            if path == "/metrics" and declared_length(scope) == 0:
                # Slow clients of the other routes must not keep a scraper out.
                await self._app(scope, receive, answer)
                return
            with _slot(self._allowances.open_public(address)):
                await self._app(scope, await self._body(scope, receive, answer, public=True), answer)
        else:
            await self._serve_caller(scope, headers, receive, answer)

    async def _serve_caller(self, scope: Scope, headers: Headers, receive: Receive, answer: Answer) -> None:
        path: str = scope["path"]
        caller = self._allowances.with_priority(self._policy.authenticate_http(scope, headers))
        scope.setdefault("state", {})["caller"] = caller
        needed = needed_scope(scope["method"], path)
        if needed is not None:
            caller.require(needed)
        self._allowances.call(caller)
        if needed == "submit":
            answer.add_at_start(lambda: self._allowances.headers(caller))
            self._allowances.submission(caller)
        if (awaited := self._parts.awaited()) is not None:
            raise awaited
        with ExitStack() as open_while:
            open_while.callback(self._allowances.open_http(caller))
            body = await self._body(scope, receive, answer)
            if not waits_for_an_outcome(scope):
                await self._app(scope, body, answer)
                return
            open_while.callback(self._allowances.open_stream(caller))
            revoked = open_while.enter_context(self._parts.connections.of(caller))
            # Without keys there is none that could be taken back.
            await self._serve_long(scope, body, answer, None if caller.key_id is None else revoked)

    async def _body(self, scope: Scope, receive: Receive, answer: Answer, *, public: bool = False) -> Receive:
        """The app's `receive`. Raises TooLarge for a length that was declared."""
        bodies = self._parts.bodies
        limit = PUBLIC_BODY_BYTES if public else bodies.of(scope)
        declared = declared_length(scope)
        if declared == 0:
            return receive
        if declared is not None and declared > limit:
            if not public:
                await discard_body(scope, receive)
            raise too_large(limit)
        timeout_s = min(PUBLIC_BODY_S, bodies.timeout_s) if public else bodies.timeout_s
        answer.body = Body(receive, limit, timeout_s, bytes_per_s(scope))
        return answer.body

    async def _serve_long(self, scope: Scope, receive: Receive, answer: Answer, revoked: asyncio.Event | None) -> None:
        """An exchange that may last: it ends with its client, and when its key is taken back."""

        async def until_gone() -> Message:
            if isinstance(receive, Body) and not receive.whole:
                return await receive()
            if revoked is None:
                return await receive()
            return await unless_set(revoked, receive, {"type": "http.disconnect"})

        polls = scope["method"] == "GET" and not scope["path"].endswith("/events")
        try:
            if polls:  # it listens to nothing but its outcome
                while isinstance(receive, Body) and not receive.whole:
                    await receive()
                await unless_gone(until_gone, self._app(scope, empty_body(until_gone), answer))
            else:
                await self._app(scope, until_gone, answer)
        except ClientGone:
            if revoked is None or not revoked.is_set():
                raise
        if revoked is not None and revoked.is_set() and not answer.ended:
            await answer.end_revoked(scope, receive)

    async def _hold_back(self, scope: Scope) -> None:
        """Refusals of one tenant go out at a pace: one that asks in a tight loop costs the others little."""
        caller = scope.get("state", {}).get("caller")
        wait_s = self._allowances.refusal_s(caller.tenant if isinstance(caller, Caller) else "")
        if wait_s:
            await asyncio.sleep(wait_s)

    # -- WebSocket

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent: set[str] = set()

        async def watched_send(message: Message) -> None:
            sent.add(message["type"])
            await send(message)

        try:
            await self._serve_socket(scope, receive, watched_send)
        except PenstockError as error:
            if isinstance(error, TenantLimit):
                await self._hold_back(scope)
            await refuse(error, scope, receive, watched_send, close_code=_close_code(error))
        except Exception as error:
            incident = log_unexpected(error, scope["path"])
            failure = InternalError("internal error", details={"incident": incident})
            if "websocket.accept" not in sent and "websocket.close" not in sent:
                await refuse(failure, scope, receive, watched_send, close_code=CLOSE_INTERNAL)
            elif "websocket.close" not in sent:
                await send({"type": "websocket.close", "code": CLOSE_INTERNAL, "reason": "internal error"})

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        self._policy.check_host(headers.get("host", ""))
        self._policy.check_origin(headers.get("origin"), headers.get("host", ""))
        caller = self._allowances.with_priority(self._policy.authenticate(headers, ticket_of(scope)))
        scope.setdefault("state", {})["caller"] = caller
        caller.require("read")
        self._allowances.call(caller)
        if (awaited := self._parts.awaited()) is not None:
            raise awaited
        with _slot(self._allowances.open_socket(caller)), self._parts.connections.of(caller) as revoked:
            scope["state"]["revoked"] = revoked
            await self._app(scope, receive, send)


def _restarts(scope: Scope) -> Overloaded:
    """What a stop cuts: of a submission nobody can say whether its record was acknowledged."""
    reason = "the gateway restarts; come again, at any other at once"
    if scope["method"] == "POST" and needed_scope("POST", scope["path"]) == "submit":
        reason += ": the request may be accepted already, which the same Idempotency-Key finds out"
    return Overloaded(reason, retry_after_s=1)


def waits_for_an_outcome(scope: Scope) -> bool:
    """Whether an exchange may last as long as a request runs: event streams, long polls and the OpenAI routes."""
    path: str = scope["path"]
    if scope["method"] == "GET":
        # Any query may hold a `wait`, in letters of its own: `wa%69t=60` is one too.
        return path.startswith("/v1/requests/") and (path.endswith("/events") or bool(scope["query_string"]))
    return scope["method"] == "POST" and path.startswith(_WAITING_POSTS)


def _close_code(error: PenstockError) -> int:
    if isinstance(error, Unauthenticated):
        return CLOSE_UNAUTHENTICATED
    return CLOSE_FORBIDDEN if isinstance(error, Forbidden) else CLOSE_OVERLOADED


@contextmanager
def _slot(give_back: Callable[[], None]) -> Generator[None]:
    try:
        yield
    finally:
        give_back()
