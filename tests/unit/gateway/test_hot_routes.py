"""Hot routes: plain calls skip the framework; all else goes through it, and the answers are the same."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway_parts import edge_of
from penstock.gateway.context import GatewayContext, put_context
from penstock.gateway.document.described_routes import TABLE
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.edge import install_edge
from penstock.gateway.hot_routes import HotRoutes, hot_endpoint
from penstock.gateway.openai import text_routes
from penstock.gateway.routes import native
from penstock.gateway.settings import GatewaySettings

JSON = [(b"content-type", b"application/json; charset=utf-8")]


@pytest.mark.parametrize(
    ("method", "path", "query", "headers", "hot"),
    [
        ("POST", "/v1/requests", b"", JSON, True),
        ("POST", "/v1/chat/completions", b"", JSON, True),
        ("GET", "/v1/requests/r1", b"", [], True),
        ("HEAD", "/v1/requests/r1", b"", [], False),
        ("GET", "/v1/requests/r1/", b"", [], False),
        ("POST", "/v1/requests", b"a=b", JSON, False),
        ("POST", "/v1/requests", b"", [], False),
        ("POST", "/v1/requests", b"", [(b"content-type", b"text/plain")], False),
        ("PUT", "/v1/requests", b"", JSON, False),
        ("GET", "/v1/requests", b"", [], False),
        ("GET", "/v1/requests/", b"", [], False),
        ("GET", "/v1/requests/r1", b"wait=1", [], False),
        ("GET", "/v1/requests/r1/events", b"", [], False),
        ("POST", "/v1/requests/cancel", b"", JSON, False),
    ],
)
def test_which_calls_are_hot(method: str, path: str, query: bytes, headers: Any, hot: bool) -> None:
    scope = {"method": method, "path": path, "query_string": query, "headers": headers}
    assert (hot_endpoint(TABLE.rules(method, path), scope) is not None) is hot


def make_app(*, hot: bool) -> FastAPI:
    app = FastAPI()
    policy = AuthPolicy.build()
    context = GatewayContext(settings=GatewaySettings(), policy=policy)
    put_context(app, context)
    for part in (native, text_routes):
        app.include_router(part.router)
    install_edge(app, edge_of(context), HotRoutes if hot else None)
    return app


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions", b"[]"),
        ("/v1/chat/completions", b"\xff"),
        ("/v1/chat/completions", b"[" * 100_000),
        ("/v1/chat/completions", b'{"model": 3, "messages": []}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}], "nonsense": 1}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}], "temperature": "warm"}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}'),
        ("/v1/requests", b"{"),
        ("/v1/requests", b'{"task": "nothing"}'),
        ("/v1/requests", b'{"task": "text_generation", "payload": {"prompt": "hi"}}'),
    ],
)
async def test_errors_are_those_of_the_framework(path: str, content: bytes) -> None:
    answers: list[tuple[int, dict[str, Any]]] = []
    for hot in (True, False):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(make_app(hot=hot)), base_url="http://127.0.0.1"
        ) as http:
            answer = await http.post(path, content=content, headers={"content-type": "application/json"})
            answers.append((answer.status_code, answer.json()["error"]))
    (status, error), (plain_status, plain_error) = answers
    assert (status, error["code"], error["param"]) == (plain_status, plain_error["code"], plain_error["param"])
    assert status in (400, 503)
