"""The edge: one ASGI class in front of the app. It asks who calls, what they may do now and how large their bodies are.

Its order: Host and Origin, public routes, the key and its scope, rates, the broker, slots, the body.
Whatever goes wrong behind it leaves in the one JSON shape.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.edge.auth import AuthPolicy, address_of, key_id_of, sent_by, ticket_of
from penstock.gateway.edge.bodies import Body, BodyLimits, declared_length, discard_body, refuse_fields
from penstock.gateway.edge.connections import Connections
from penstock.gateway.edge.cors import Cors, readable_by
from penstock.gateway.edge.disconnects import ClientGone, unless_gone
from penstock.gateway.edge.encodings import Unzipped, encoding_of
from penstock.gateway.edge.errors import (
    CLOSE_FORBIDDEN,
    CLOSE_INTERNAL,
    CLOSE_OVERLOADED,
    CLOSE_UNAUTHENTICATED,
    EdgeRefusal,
    error_response,
    install_error_handlers,
    log_unexpected,
    refuse_socket,
)
from penstock.gateway.edge.exchanges import Answer, RawHeaders, body_again, empty_body, unless_set
from penstock.gateway.edge.http_log import log_answer
from penstock.gateway.edge.rules import UNKNOWN, WEBSOCKET, Access, Lasts, Narrowed, RouteTable, Rules, Takes, rules_of
from penstock.gateway.edge.tickets import mask_server_logs
from penstock.gateway.http_metrics import HttpMetrics
from penstock.gateway.limits.allowances import REFUSALS_PER_S, UNAUTHENTICATED_PER_S, Allowances
from penstock.gateway.limits.callers import Caller
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    InternalError,
    NotFound,
    Overloaded,
    PenstockError,
    TenantLimit,
    Unauthenticated,
)

logger = logging.getLogger(__name__)

Audited = Callable[[int], Awaitable[None]]
"""Gets the status of the answer."""


async def _unaudited(scope: Scope, rules: Rules, caller: Caller, body: bytes) -> Audited:
    async def answered(status: int) -> None:
        pass

    return answered


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeParts:
    """What the edge asks. `awaited` names why a call of a scope cannot be served yet, or None.

    `check_reached` refuses a path that the ticket of a narrowed caller does not reach.
    """

    routes: RouteTable
    not_found: Callable[[str], NotFound] = lambda path: NotFound(f"there is no route {path[:200]}")
    policy: AuthPolicy
    allowances: Allowances
    connections: Connections
    bodies: BodyLimits
    awaited: Callable[[str | None], PenstockError | None] = lambda _: None
    read_headers: Callable[[], RawHeaders] = lambda: []
    """What answers of the scopes `read` and `admin` begin with."""
    audit: Callable[[Scope, Rules, Caller, bytes], Awaitable[Audited]] = _unaudited
    """Records an operator's action with its body before it is done. Raises BrokerUnavailable."""
    check_reached: Callable[[Caller, str], Awaitable[None]]
    metrics: HttpMetrics


def install_edge(
    app: FastAPI,
    parts: EdgeParts,
    first: Callable[[ASGIApp], ASGIApp] | None = None,
    outermost: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> None:
    """Set up the edge and the error handlers of an app. Call it once.

    `first` is asked before the app's router, `outermost` before all else.
    """
    install_error_handlers(app)
    mask_server_logs()

    def stack() -> ASGIApp:
        # The framework's own outer layers (errors, telemetry, body limits) are what the edge does itself.
        handlers = dict(app.exception_handlers)
        router: ASGIApp = AsyncExitStackMiddleware(app.router)
        inner = ExceptionMiddleware(router if first is None else first(router), handlers=handlers)
        edge = Edge(inner, ExceptionMiddleware(_refusing(parts), handlers=handlers), parts)
        return outermost(Cors(edge, parts.policy.allowed_origins))

    app.build_middleware_stack = stack


def _refusing(parts: EdgeParts) -> ASGIApp:
    """What answers where no route does."""

    async def refuse_unknown(scope: Scope, receive: Receive, send: Send) -> None:
        if methods := parts.routes.methods(scope["path"]):
            raise HTTPException(405, headers={"Allow": ", ".join(methods)})
        raise parts.not_found(scope["path"])

    return refuse_unknown


class Edge:
    """Sees every HTTP exchange and every WebSocket, but for preflights."""

    def __init__(self, app: ASGIApp, unknown: ASGIApp, parts: EdgeParts) -> None:
        self._app = app
        self._unknown = unknown
        self._parts = parts
        self._policy = parts.policy
        self._allowances = parts.allowances

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
        answer, began_s = Answer(send), time.monotonic()
        try:
            await self._exchange(scope, headers, receive, answer)
        finally:
            rules: Rules = scope["state"].get("rules", UNKNOWN)
            self._parts.metrics.answered(scope["method"], rules.path, answer.status, time.monotonic() - began_s)
            log_answer(scope, headers, began_s, status=answer.status, request_id=answer.request_id)

    async def _exchange(self, scope: Scope, headers: Headers, receive: Receive, answer: Answer) -> None:
        try:
            await self._serve(scope, headers, receive, answer)
        except (ClientGone, ClientDisconnect):
            if answer.refusal is not None and answer.streams_events:
                await answer.refuse(answer.refusal, scope, receive)
            return
        except asyncio.CancelledError:
            # The time that open exchanges have at a stop is over: the server would say a bare 500.
            if not answer.started:
                await error_response(_restarts(rules_of(scope)))(scope, receive, answer)
            raise
        except (PenstockError, EdgeRefusal) as raised:
            error = raised.error if isinstance(raised, EdgeRefusal) else raised
            caller: Caller | None = scope["state"].get("caller")
            self._parts.metrics.refused(None if caller is None else caller.tenant, error.code)
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
        rules = self._rules(scope["method"], scope)
        if rules.access is Access.PROBE:  # orchestrators ask under any name, and hear nothing worth stealing
            await self._app(scope, receive, answer)
            return
        origin = headers.get("origin")
        try:
            self._policy.check_host(headers.get("host", ""))
            self._policy.check_origin(origin, headers.get("host", ""))
        except Forbidden:
            answer.add_at_start(lambda: readable_by(origin))
            raise
        if rules.access is Access.CALLER:
            await self._serve_caller(rules, scope, headers, receive, answer)
        else:
            await self._serve_public(rules, scope, receive, answer)

    def _rules(self, method: str, scope: Scope) -> Rules:
        rules = self._parts.routes.rules(method, scope["path"])
        scope.setdefault("state", {})["rules"] = rules
        return rules

    async def _serve_public(self, rules: Rules, scope: Scope, receive: Receive, answer: Answer) -> None:
        address = address_of(scope)
        self._allowances.public_call(address)
        if rules.access is Access.SCRAPER and declared_length(scope) == 0:
            await self._app(scope, receive, answer)
            return
        with _slot(self._allowances.open_public(address)):
            app = self._unknown if rules is UNKNOWN else self._app
            await app(scope, await self._body(rules, scope, receive, answer), answer)

    async def _serve_caller(
        self, rules: Rules, scope: Scope, headers: Headers, receive: Receive, answer: Answer
    ) -> None:
        caller = self._admitted(rules, scope, headers)
        look = scope["state"]["current_caller"]
        if rules.scope in ("read", "admin"):
            answer.add_at_start(self._parts.read_headers)
        if rules.scope == "read":
            answer.look_at_each_piece(look)
        if rules.scope == "submit":
            answer.add_at_start(lambda: self._allowances.headers(caller))
            self._allowances.submission(caller)
        if (awaited := self._parts.awaited(rules.scope)) is not None:
            raise awaited
        with ExitStack() as open_while:
            open_while.callback(self._allowances.open_http(caller))
            if caller.is_narrowed and rules.narrowed is Narrowed.BY_PATH:
                await self._parts.check_reached(caller, scope["path"])

            def hold(size_bytes: int) -> None:
                open_while.callback(self._allowances.hold_body(caller, size_bytes))

            body = await self._body(rules, scope, receive, answer, hold, look)
            if rules.takes is Takes.NOTHING and scope["method"] in ("POST", "DELETE") and isinstance(body, Body):
                refuse_fields(await body.content())
                body = empty_body(body)
            if rules.is_audited(scope["method"]):
                await self._serve_audited(rules, scope, body, answer, caller)
                return
            if not rules.lasts_long(scope):
                await self._app(scope, body, answer)
                return
            open_while.callback(self._allowances.open_stream(caller))
            revoked = open_while.enter_context(self._parts.connections.of(caller))
            await self._serve_long(rules, scope, body, answer, revoked if caller.may_end else None)

    def _admitted(self, rules: Rules, scope: Scope, headers: Headers) -> Caller:
        """The caller of an exchange that its key, its ticket and its rate allow; `caller_of` looks at them again.

        Raises Unauthenticated, Forbidden, TenantLimit, InvalidRequest.
        """
        ticket = ticket_of(scope) if rules.tickets else None
        artifact_id = scope["path"].split("/")[3] if "artifact" in rules.tickets else None
        try:
            caller = self._policy.authenticate(headers, ticket, rules.tickets, artifact_id)
        except (Unauthenticated, BrokerUnavailable) as error:  # a key is not known to be good while keys are not read
            if isinstance(error, Unauthenticated):
                self._parts.metrics.unauthenticated(sent_by(headers, ticket))
            self._refused(address_of(scope), headers)
            raise
        caller = self._allowances.with_priority(caller)
        if (user := self._policy.proxies.user_of(scope, headers)) is not None:
            caller = replace(caller, user=user)

        def current() -> Caller:
            now = self._allowances.current(caller)
            if rules.scope is not None:
                now.require(rules.scope)
            return now

        scope["state"] |= {"caller": caller, "current_caller": current}
        if rules.scope is not None:
            caller.require(rules.scope)
        if caller.is_narrowed and rules.narrowed is Narrowed.REFUSED:
            raise Forbidden("the ticket is for some requests of its tenant: it does not reach this route")
        if rules.scope != "admin":  # an operator mends with it a limit that leaves its tenant no call
            self._allowances.call(caller)
        return caller

    def _refused(self, address: str, headers: Headers) -> None:
        """Count a call without a good key. Raises TenantLimit."""
        if self._allowances.is_logged(address):
            logger.warning("auth.refused address=%s key=%s", address, key_id_of(headers))
        self._allowances.unauthenticated_call(address)

    async def _body(
        self,
        rules: Rules,
        scope: Scope,
        receive: Receive,
        answer: Answer,
        hold: Callable[[int], None] = lambda size_bytes: None,
        look: Callable[[], object] = lambda: None,
    ) -> Receive:
        """The app's `receive`. Raises TooLarge for a length that was declared, and what `hold` raises.

        `hold` takes room in memory for a large body. `look` refuses the rest of one whose caller has lost its rights.
        """
        declared = declared_length(scope)
        if declared == 0:
            return receive
        try:
            encoding = encoding_of(scope)
        except PenstockError:
            await discard_body(scope, receive)
            raise
        bodies = self._parts.bodies
        if declared is not None and declared > bodies.of(rules, scope):
            if rules.access is Access.CALLER:
                await discard_body(scope, receive)
            raise bodies.refusal(rules, scope)
        if encoding is not None:
            receive, declared = Unzipped(receive, bodies.of(rules, scope), bodies.refusal(rules, scope)), None
        try:
            answer.body = bodies.body(rules, scope, receive, hold, declared, look)
        except PenstockError:  # there is no room for it now
            await discard_body(scope, receive)
            raise
        return answer.body

    async def _serve_audited(
        self, rules: Rules, scope: Scope, receive: Receive, answer: Answer, caller: Caller
    ) -> None:
        """An operator's action. One that is cut off, as by a stop, has no outcome: it may be done or not."""
        content = await receive.content() if isinstance(receive, Body) else b""
        answered = await self._parts.audit(scope, rules, caller, content)
        try:
            await self._app(scope, body_again(content, receive), answer)
        except Exception:
            await answered(answer.status or 500)
            raise
        await answered(answer.status)

    async def _serve_long(
        self, rules: Rules, scope: Scope, receive: Receive, answer: Answer, revoked: asyncio.Event | None
    ) -> None:
        """An exchange that may last: it ends with its client, and when its key is taken back."""

        async def until_gone() -> Message:
            if isinstance(receive, Body) and not receive.whole:
                return await receive()
            if revoked is None:
                return await receive()
            return await unless_set(revoked, receive, {"type": "http.disconnect"})

        try:
            if rules.lasts is Lasts.WAITING and rules.takes is Takes.NOTHING:  # it listens to nothing but its outcome
                while isinstance(receive, Body) and not receive.whole:
                    await receive()
                await unless_gone(until_gone, self._app(scope, empty_body(until_gone), answer))
            else:
                await self._app(scope, until_gone, answer)
        except ClientGone:
            if revoked is None or not revoked.is_set():
                raise
        if revoked is not None and revoked.is_set() and not answer.ended:
            await answer.refuse(self._why_ended(scope), scope, receive)

    def _why_ended(self, scope: Scope) -> PenstockError:
        try:
            scope["state"]["current_caller"]()
        except PenstockError as error:
            return error
        return Unauthenticated("this key has lost rights that it had when the call began")

    async def _hold_back(self, scope: Scope) -> None:
        """Refusals of one tenant or address go out at a pace: a tight loop costs the others little.

        Those that wait are bounded; the others go out at once.
        """
        caller = scope.get("state", {}).get("caller")
        holder = f"the tenant {caller.tenant}" if isinstance(caller, Caller) else f"the address {address_of(scope)}"
        guesses = not isinstance(caller, Caller) and rules_of(scope).access is Access.CALLER
        per_s = UNAUTHENTICATED_PER_S if guesses else REFUSALS_PER_S
        wait_s = self._allowances.refusal_s(holder, per_s)
        with suppress(Overloaded, TenantLimit), _slot(self._allowances.open_refusal(holder)):
            await asyncio.sleep(wait_s)

    # -- WebSocket

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent: set[str] = set()
        headers, began_s, code = Headers(scope=scope), time.monotonic(), 0

        async def watched_send(message: Message) -> None:
            nonlocal code
            sent.add(message["type"])
            code = code or message.get("code", 0)
            await send(message)

        async def watched_receive() -> Message:
            nonlocal code
            message = await receive()
            code = code or message.get("code", 0)
            return message

        try:
            await self._serve_socket(scope, watched_receive, watched_send)
        except PenstockError as error:
            if isinstance(error, TenantLimit):
                await self._hold_back(scope)
            await refuse_socket(error, scope, receive, watched_send, close_code=_close_code(error))
        except Exception as error:
            incident = log_unexpected(error, scope["path"])
            failure = InternalError("internal error", details={"incident": incident})
            if "websocket.accept" not in sent and "websocket.close" not in sent:
                await refuse_socket(failure, scope, receive, watched_send, close_code=CLOSE_INTERNAL)
            elif "websocket.close" not in sent:
                await watched_send({"type": "websocket.close", "code": CLOSE_INTERNAL, "reason": "internal error"})
        finally:
            log_answer(scope, headers, began_s, status=code)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        rules = self._rules(WEBSOCKET, scope)
        self._policy.check_host(headers.get("host", ""))
        self._policy.check_origin(headers.get("origin"), headers.get("host", ""))
        caller = self._admitted(rules, scope, headers)
        if rules is UNKNOWN:  # as the framework refuses it
            await send({"type": "websocket.close", "code": 1000, "reason": ""})
            return
        if (awaited := self._parts.awaited(rules.scope)) is not None:
            raise awaited
        with _slot(self._allowances.open_socket(caller)), self._parts.connections.of(caller) as revoked:
            scope["state"]["revoked"] = revoked
            await self._app(scope, receive, send)


def _restarts(rules: Rules) -> Overloaded:
    """What a stop cuts: of a submission nobody can say whether its record was acknowledged."""
    reason = "the gateway restarts: use another gateway now, or retry here in 1 s"
    if rules.scope == "submit":
        reason += ": the request may be accepted already, which the same Idempotency-Key finds out"
    return Overloaded(reason, retry_after_s=1)


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
