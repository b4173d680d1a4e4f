"""Hot routes: plain calls skip the framework, all others go through it, and the responses are the same."""

from __future__ import annotations

import pytest

from kit.gateway_http import client, gateway_app, scope_of
from penstock.gateway.document.described_routes import TABLE
from penstock.gateway.hot_routes import hot_endpoint
from penstock.gateway.openai import text_routes
from penstock.gateway.routes import native

JSON = b"application/json; charset=utf-8"
CHAT, REQUESTS = "/v1/chat/completions", "/v1/requests"


@pytest.mark.parametrize(
    ("method", "path", "content_type", "query", "hot"),
    [
        ("POST", REQUESTS, JSON, b"", True),
        ("POST", CHAT, JSON, b"", True),
        ("GET", "/v1/requests/r1", None, b"", True),
        ("HEAD", "/v1/requests/r1", None, b"", False),
        ("GET", "/v1/requests/r1/", None, b"", False),
        ("POST", REQUESTS, JSON, b"a=b", False),
        ("POST", REQUESTS, None, b"", False),
        ("POST", REQUESTS, b"text/plain", b"", False),
        ("PUT", REQUESTS, JSON, b"", False),
        ("GET", REQUESTS, None, b"", False),
        ("GET", "/v1/requests/", None, b"", False),
        ("GET", "/v1/requests/r1", None, b"wait=1", False),
        ("GET", "/v1/requests/r1/events", None, b"", False),
        ("POST", "/v1/requests/cancel", JSON, b"", False),
    ],
)
def test_which_calls_are_hot(method: str, path: str, content_type: bytes | None, query: bytes, hot: bool) -> None:
    scope = scope_of(method, path, [] if content_type is None else [(b"content-type", content_type)], query)
    assert (hot_endpoint(TABLE.rules(method, path), scope) is not None) is hot


MESSAGES = b'"messages": [{"role": "user", "content": "hi"}]'
CHATS = [b"{", b"", b"[]", b"\xff", b"[" * 100_000, b'{"model": 3, "messages": []}', b"{%s}" % MESSAGES]
CHATS += [b'{%s, "nonsense": 1}' % MESSAGES, b'{%s, "temperature": "warm"}' % MESSAGES]
OTHERS = [b"{", b'{"task": "nothing"}', b'{"task": "text_generation", "payload": {"prompt": "hi"}}']


@pytest.mark.parametrize(("path", "content"), [*((CHAT, one) for one in CHATS), *((REQUESTS, one) for one in OTHERS)])
async def test_errors_are_those_of_the_framework(path: str, content: bytes) -> None:
    answers: list[tuple[int, str, str | None]] = []
    for hot in (True, False):
        async with client(gateway_app(native.router, text_routes.router, hot=hot)) as http:
            answer = await http.post(path, content=content, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            answers.append((answer.status_code, error["code"], error["param"]))
    assert answers[0] == answers[1]
    assert answers[0][0] in (400, 503)
