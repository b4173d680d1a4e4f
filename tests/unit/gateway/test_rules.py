"""The table of routes: every route is in it, and each call finds the rules of the route that answers it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import APIRouter, WebSocket
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Match

from kit.gateway_http import call, gateway_app, scope_of
from penstock.gateway.app import ROUTERS, create_app
from penstock.gateway.document.described_routes import ROUTES, TABLE
from penstock.gateway.edge.keys import create_key
from penstock.gateway.edge.rules import (
    UNKNOWN,
    WEBSOCKET,
    Access,
    Lasts,
    RouteKey,
    RouteTable,
    Rules,
    Takes,
    check_declared,
    shown_path,
)
from penstock.gateway.hot_routes import hot_endpoint
from penstock.gateway.openai import text_routes
from penstock.gateway.routes import native
from penstock.gateway.settings import AuthSection, GatewaySettings

WORDS = st.text("abcdefgh-:. ", min_size=1, max_size=8)
ROUTES_IN_ORDER = [route for router in ROUTERS for route in router.routes]


def test_a_route_that_is_not_declared_does_not_start() -> None:
    check_declared(ROUTES_IN_ORDER, ROUTES)
    router = APIRouter()

    @router.get("/v1/new/{one}")
    async def _new(one: str) -> str:  # pyright: ignore[reportUnusedFunction]
        return one

    @router.websocket("/v1/socket")
    async def _socket(socket: WebSocket) -> None:  # pyright: ignore[reportUnusedFunction]
        await socket.close()

    declared: list[RouteKey] = [("GET", "/v1/new/{one}"), (WEBSOCKET, "/v1/socket")]
    check_declared(router.routes, declared)
    for keys, words in (
        (declared[:1], r"without a declaration.*/v1/socket"),
        ([*declared, ("GET", "/v1/gone")], r"without a route.*/v1/gone"),
    ):
        with pytest.raises(LookupError, match=words):
            check_declared(router.routes, keys)
    router.mount("/files", router)
    with pytest.raises(LookupError, match="cannot be declared"):
        check_declared(router.routes, declared)


@given(data=st.data())
def test_the_rules_are_those_of_the_route_that_answers(data: st.DataObject) -> None:
    """Against the framework's own matching, with words in the place of parameters that look like anything."""
    method, path = data.draw(st.sampled_from(sorted(key for key in ROUTES if key[0] != WEBSOCKET)))
    words = {"cancel", "events", "content", *re.findall(r"[a-z]+", path)}
    one = WORDS | st.sampled_from(sorted(words))
    several = st.lists(one, min_size=1, max_size=3).map("/".join)
    asked = re.sub(r"\{\w+(:path)?\}", lambda found: data.draw(several if found[1] else one), path)
    scope = {"type": "http", "method": method, "path": asked, "root_path": ""}
    answers = next(route for route in ROUTES_IN_ORDER if route.matches(scope)[0] is Match.FULL)
    path_of: str = answers.path  # pyright: ignore[reportAttributeAccessIssue]
    assert TABLE.rules(method, asked) == replace(ROUTES[method, path_of].rules, path=shown_path(path_of))
    if method == "GET":
        assert TABLE.rules("HEAD", asked) is TABLE.rules(method, asked)


FILLS = ("x", "a/b", "", "..", "%2F", "a\n", "\n", "load", "x/load", "cancel", "a//b", "/", "x/")
METHODS = ("GET", "HEAD", "POST", "DELETE", "PUT", "OPTIONS")
ENDS = ("", "/", "//", "\n", "/\n", "?", "/x", "/load", " ", "\r", "\x85", "\u2028")


def test_no_path_reaches_a_route_by_other_rules_than_its_own() -> None:
    filled = {re.sub(r"\{[^}]*\}", fill, pattern) for _, pattern in ROUTES for fill in FILLS}
    for path, method in itertools.product((one + end for one in filled for end in ENDS), METHODS):
        rules = TABLE.rules(method, path)
        if rules is UNKNOWN:
            continue  # what is unknown never reaches the framework
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        hit = next((one for one in ROUTES_IN_ORDER if one.matches(scope)[0] is Match.FULL), None)
        if hit is None:
            continue
        own = ROUTES["GET" if method == "HEAD" else method, hit.path].rules  # pyright: ignore[reportAttributeAccessIssue]
        assert (rules.access, rules.scope) == (own.access, own.scope), (method, path)


async def test_an_unknown_path_and_another_method_have_no_route(tmp_path: Path) -> None:
    create_key(tmp_path / "keys.json", tenant="acme")
    app = create_app(GatewaySettings(auth=AuthSection(keys_file=tmp_path / "keys.json")))
    answer = await call(app, "GET", "/v1/models%0A")
    assert (answer.status_code, answer.json()["error"]["message"][:17]) == (404, "there is no route"), answer.text
    wrong = await call(app, "PATCH", "/v1/requests")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, POST")
    assert "PATCH is not allowed here; GET, POST is" in wrong.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("HEAD", "/v1/artifacts/a/content/", "read"),  # a slash at the end changes nothing
        ("GET", "/v1/requests", "read"),
        ("POST", "/v1/requests", "submit"),
        ("POST", "/v1/requests/x/cancel", "cancel"),
        ("POST", "/v1/requests/cancel", "cancel"),
        ("POST", "/v1/requests/x/reprioritize", "cancel"),
        ("POST", "/v1/requests/reprioritize", "cancel"),
        ("DELETE", "/v1/conversations/x", "cancel"),
        ("POST", "/v1/artifacts/x/url", "read"),
        ("POST", "/v1/tickets", None),
        ("GET", "/v1/admin/stats", "admin"),
        (WEBSOCKET, "/v1/ws", "read"),
    ],
)
def test_scopes(method: str, path: str, scope: str | None) -> None:
    rules = TABLE.rules(method, path)
    assert (rules.access, rules.scope) == (Access.CALLER, scope)


def test_which_paths_need_no_key() -> None:
    """None under /v1, but paths without a route."""
    public = {path for (_, path), declared in ROUTES.items() if declared.rules.access is not Access.CALLER}
    console = {"/", "/console", "/console/{name:path}"}
    pages = {*console, "/docs", "/openapi.json", "/asyncapi.json", "/metrics", "/health", "/healthz", "/readyz"}
    assert {path for path in public if not path.startswith("/registry/")} == pages
    for path in ("/v1/nothing", "/favicon.ico", "/redoc", "/docs/oauth2-redirect", "/web/"):
        assert TABLE.rules("GET", path) is UNKNOWN
    assert TABLE.rules("PATCH", "/v1/requests") is UNKNOWN


@pytest.mark.parametrize(
    ("method", "path", "query", "lasts"),
    [
        ("GET", "/v1/requests/r/events", b"", True),
        ("GET", "/v1/requests/r", b"wait=3", True),
        ("GET", "/v1/requests/r", b"wa%69t=3", True),
        ("GET", "/v1/requests/r", b"", False),
        ("POST", "/v1/chat/completions", b"", True),
        ("POST", "/v1/requests", b"", False),
        ("POST", "/v1/requests", b"wait=3", True),
    ],
)
def test_which_calls_may_last(method: str, path: str, query: bytes, lasts: bool) -> None:
    assert TABLE.rules(method, path).lasts_long({"query_string": query}) is lasts


def test_files_and_hot_routes() -> None:
    """The framework redirects a path with a slash at its end; until then the same limits apply to its body."""
    assert TABLE.rules("POST", "/v1/artifacts/").takes is Takes.FILE
    hot = {key for key, declared in ROUTES.items() if declared.rules.hot is not None}
    assert hot == {
        ("GET", "/v1/admin/overview"),
        ("POST", "/v1/requests"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/requests/{request_id}"),
    }


def test_the_first_declared_wins() -> None:
    first, second = Rules(scope="read"), Rules(lasts=Lasts.OUTCOME)
    table = RouteTable({("GET", "/a/{b:path}/c"): first, ("GET", "/a/{b:path}"): second})
    calls = [("GET", "/a/x/y/c"), ("GET", "/a/x/y"), ("GET", "/a/"), ("POST", "/a/x")]
    assert [table.rules(*call).path for call in calls] == ["/a/{b}/c", "/a/{b}", UNKNOWN.path, UNKNOWN.path]


# -- hot routes


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
        app = gateway_app(native.router, text_routes.router, hot=hot)
        answer = await call(app, "POST", path, content=content, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        answers.append((answer.status_code, error["code"], error["param"]))
    assert answers[0] == answers[1]
    assert answers[0][0] in (400, 503)
