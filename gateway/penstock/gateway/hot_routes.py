"""The routes that are called for every request, and by every open console: found by one look-up and called without the
framework's solving.

The framework has them too: for the documentation, and for all that is not plain (a query, another content type).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.context import context_of
from penstock.gateway.edge.rules import Endpoint, Rules, Takes, rules_of
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.openai import chat_bodies as shapes
from penstock.gateway.openai import text_routes
from penstock.gateway.routes import admin, native
from penstock.gateway.routes.multipart import read_json

_ONE_REQUEST = "/v1/requests/"


async def submit(request: Request) -> Response:
    return await native.submit(request, request.headers.get("idempotency-key"))


async def chat(request: Request) -> Response:
    body = validated(shapes.ChatCompletionBody, await read_json(request))
    return await text_routes.create_chat_completion(body, request)


async def one_request(request: Request) -> Response:
    return await native.get_request(request, request.scope["path"].removeprefix(_ONE_REQUEST), 0)


admin_overview = admin.admin_overview
"""Each open console asks for it every three seconds."""


class HotRoutes:
    """In front of the app's router; the edge has found the route's rules."""

    def __init__(self, router: ASGIApp) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await _response(rules_of(scope), Request(scope, receive, send)) if scope["type"] == "http" else None
        await (self._router if response is None else response)(scope, receive, send)


async def _response(rules: Rules, request: Request) -> Response | None:
    if rules.shared and request.method == "GET":
        held = await context_of(request).shared.held(request, caller_of(request))
        if held is not None:
            return held
    endpoint = hot_endpoint(rules, request.scope)
    return None if endpoint is None else await endpoint(request)


def hot_endpoint(rules: Rules, scope: Scope) -> Endpoint | None:
    """The endpoint of a plain call of a hot route: by its own method, without a query, with a body that is JSON."""
    if rules.hot is None or scope["query_string"] or scope["method"] == "HEAD" or scope["path"].endswith("/"):
        return None
    return rules.hot if rules.takes is Takes.NOTHING or _is_json(scope) else None


def _is_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            return value.split(b";")[0].strip().lower() == b"application/json"
    return False
