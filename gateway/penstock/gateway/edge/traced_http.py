"""The span of an HTTP exchange, in front of the edge."""

from __future__ import annotations

import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.common import tracing as names
from penstock.common.telemetry import Telemetry
from penstock.common.tracing import Attributes, Span, SpanContext, context_of
from penstock.gateway.edge.rules import UNKNOWN, Access, Rules
from penstock.schemas.topics import HEADER_TRACEPARENT


class TracedHttp:
    """In front of the edge. Whatever is behind it finds the exchange's own span as `traceparent`.

    Probes, scrapes and the console's files have no span.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, start_ns, status = MutableHeaders(scope=scope), time.time_ns(), 0
        parent = context_of(headers.get(HEADER_TRACEPARENT))
        context = self._telemetry.begin(parent, f"{scope['method']}", "server")
        headers[HEADER_TRACEPARENT] = context.traceparent

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            rules: Rules = scope.get("state", {}).get("rules", UNKNOWN)
            if rules.access is Access.CALLER and context.sampled:
                span = _exchange(scope["method"], rules.path, status, context, parent, start_ns)
                self._telemetry.end((span,))


def _exchange(
    method: str, route: str, status: int, context: SpanContext, parent: SpanContext | None, start_ns: int
) -> Span:
    """`status`: 0 for an answer that did not begin."""
    attributes: Attributes = {names.METHOD: method, names.ROUTE: route}
    if status:
        attributes[names.STATUS_CODE] = status
    return Span(
        name=f"{method} {route}",
        kind="server",
        context=context,
        parent=parent,
        start_ns=start_ns,
        end_ns=time.time_ns(),
        attributes=attributes,
        error=str(status or "no answer") if status >= 500 or not status else None,
    )
