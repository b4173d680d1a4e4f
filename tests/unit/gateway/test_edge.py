"""The edge: limits and CORS on every response, refusals of every layer included."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.types import Message, Receive, Scope, Send

from gateway_parts import edge_of, routes_with
from kit.gateway_http import call, client, exchange, gateway_app, gateway_context, scope_of
from kit.refusals import refused
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.connections import Connections
from penstock.gateway.edge.disconnects import unless_gone
from penstock.gateway.edge.edge import Edge, install_edge
from penstock.gateway.edge.errors import FinalFailure, outcome_error, refuse_socket
from penstock.gateway.edge.rules import Rules
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.allowances import Allowances, Totals
from penstock.gateway.limits.callers import ANYBODY, Caller, caller_of
from penstock.gateway.limits.limits import Limits
from penstock.gateway.routes.commands import PriorityBody
from penstock.schemas.errors import (
    BrokerUnavailable,
    Cancelled,
    EngineFailed,
    InsufficientCapacity,
    InternalError,
    InvalidRequest,
    Overloaded,
    TenantLimit,
    Unauthenticated,
)
from penstock.schemas.logs import parts_of
from support import wait_until_async

PAGE = "https://app.example"
STAINLESS = "authorization, content-type, x-stainless-arch, x-stainless-os, x-stainless-retry-count"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": STAINLESS}
CHAT, REQUESTS = "/v1/chat/completions", "/v1/requests"
MULTIPART = {"content-type": "multipart/form-data; boundary=b"}
LENGTH_10 = [(b"content-length", b"10")]


class Site:
    """An app behind the edge. Its chats last until `release` is set."""

    def __init__(
        self, *, origins: Sequence[str] = (PAGE,), bodies: Any = None, awaited: Any = None, **limits: Any
    ) -> None:
        self.allowances = Allowances(**limits)
        self.policy = AuthPolicy.build(allowed_origins=origins)
        self.is_good = True
        self.connections = Connections(lambda _: self.is_good)
        self.release = asyncio.Event()
        self.app = app = FastAPI()

        @app.api_route(REQUESTS, methods=["GET", "POST"])
        async def _requests(request: Request) -> str:
            await request.body()
            return caller_of(request).tenant

        @app.post(CHAT)
        async def _chat(request: Request) -> str:
            await unless_gone(request.receive, self.release.wait())
            return "done"

        @app.get("/v1/fails")
        async def _fails() -> None:
            raise RuntimeError("secret")

        @app.get("/healthz")
        async def _healthz() -> str:
            return "ok"

        context = gateway_context(policy=self.policy, allowances=self.allowances)
        context.connections, self.metrics = self.connections, context.metrics
        routes = routes_with({("GET", f"/v1/{name}"): Rules(scope="read") for name in ("fails", "nothing")})
        bodies = bodies or BodyLimits(max_bytes=100, max_file_bytes=1000)
        install_edge(app, edge_of(context, routes, bodies, awaited or (lambda _: None)))

    def client(self, **headers: str) -> httpx.AsyncClient:
        return client(self.app, **headers)

    async def chatting(self, call: Any, count: int = 1) -> Any:
        """The call as a task, once so many chats are open."""
        task = asyncio.ensure_future(call)
        await wait_until_async(lambda: self.allowances.streams.open == count, describe="the chat is open")
        return task


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    return answer.status_code, answer.json()["error"]["code"], answer.headers.get("retry-after")


async def drip(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 10):
        yield b"x" * 10


# -- limits


async def test_submissions_carry_the_limit_as_openai_reports_it() -> None:
    site = Site(defaults=Limits(requests_per_s=2, tokens_per_minute=600), clock=lambda: 0.0)
    async with site.client() as http:
        answers = [await http.post(REQUESTS) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert refusal(answers[-1]) == (429, "tenant_limit", "1")
        assert answers[-1].json()["error"]["details"] == {"limit": "requests_per_s", "value": 2}
        assert "x-should-retry" not in answers[-1].headers
        names = ("limit-requests", "limit-tokens", "remaining-tokens", "reset-tokens")
        for answer in answers:
            assert [answer.headers[f"x-ratelimit-{name}"] for name in names] == ["2", "600", "600", "0ms"]
        read = await http.get(REQUESTS)
        assert (read.status_code, "x-ratelimit-limit-requests" in read.headers) == (200, False)


async def test_calls_of_every_kind_count_and_probes_do_not() -> None:
    assert ANYBODY.limits == Limits()
    async with Site(defaults=Limits(calls_per_s=2), clock=lambda: 0.0).client() as http:
        assert [(await http.get(REQUESTS)).status_code for _ in range(3)] == [200, 200, 429]
        assert (await http.get("/healthz")).status_code == 200


async def test_calls_and_refusals_are_counted_by_route() -> None:
    site = Site(defaults=Limits(calls_per_s=1), clock=lambda: 0.0)
    async with site.client() as http:
        for path in (REQUESTS, REQUESTS, "/v1/odd"):
            await http.get(path)
    lines = {*site.metrics.render().decode().splitlines()}
    assert {
        f'penstock_http_requests_total{{method="GET",route="{REQUESTS}",status="200"}} 1.0',
        f'penstock_http_requests_total{{method="GET",route="{REQUESTS}",status="429"}} 1.0',
        f'penstock_http_seconds_count{{method="GET",route="{REQUESTS}"}} 2.0',
        'penstock_http_requests_total{method="none",route="none",status="404"} 1.0',
        'penstock_refused_total{code="tenant_limit",tenant="default"} 1.0',
    } <= lines


async def test_waiting_exchanges_have_slots_of_their_own_and_others_are_served() -> None:
    site = Site(defaults=Limits(streams=2), totals=Totals(max_http=4))
    async with site.client() as http:
        waiting = await site.chatting(asyncio.gather(http.post(CHAT), http.post(CHAT)), 2)
        refused = await http.post(CHAT)
        assert (refused.status_code, refused.json()["error"]["details"]["value"]) == (429, 2)
        assert (await http.get(REQUESTS)).status_code == 200
        site.release.set()
        assert [answer.status_code for answer in await waiting] == [200, 200]
        assert (await http.post(CHAT)).status_code == 200
    assert site.allowances.streams.open == 0


async def test_beyond_the_limit_newcomers_are_shed_and_probes_are_not() -> None:
    site = Site(totals=Totals(max_http=1))
    async with site.client() as http:
        waiting = await site.chatting(http.post(CHAT))
        assert refusal(await http.get(REQUESTS)) == (503, "overloaded", "1")
        assert (await http.get("/healthz")).status_code == 200
        site.release.set()
        assert (await waiting).status_code == 200


async def test_an_address_takes_its_share_of_public_slots_and_a_scraper_needs_none() -> None:
    site = Site(totals=Totals(max_public=2, max_public_of_one=1))
    taken = site.allowances.open_public("127.0.0.1")
    async with site.client() as http:
        assert (await http.get("/registry/subjects")).status_code == 429
        taken()
        assert (await http.get("/registry/subjects")).status_code == 404, "this app has none"
        for address in ("a", "b"):
            site.allowances.open_public(address)
        assert (await http.get("/registry/subjects")).status_code == 503
        assert (await http.get("/metrics")).status_code == 404
        assert (await http.request("GET", "/metrics", content=b"x")).status_code == 503
    assert site.allowances.public.open == 2


async def test_while_the_broker_is_awaited_calls_are_refused_with_the_reason() -> None:
    site = Site(awaited=lambda _: BrokerUnavailable("not yet", retry_after_s=1))
    async with site.client(origin=PAGE) as http:
        refused = await http.get(REQUESTS)
        assert refusal(refused) == (503, "broker_unavailable", "1")
        assert refused.headers["access-control-allow-origin"] == PAGE
        assert (await http.get("/healthz")).status_code == 200


# -- bodies


def site_for_large_bodies(**totals: Any) -> Site:
    bodies = BodyLimits(max_bytes=100, max_large_bytes=1_000)
    return Site(totals=Totals(large_bodies_bytes=1_500, **totals), bodies=bodies)


async def test_a_large_body_is_taken_while_there_is_room_in_memory() -> None:
    site, big = site_for_large_bodies(), b'"' + b"x" * 898 + b'"'
    large = site.allowances.large_bodies
    async with site.client() as http:
        waiting = await site.chatting(http.post(CHAT, content=big))
        await wait_until_async(lambda: large.open == 900, describe="the large body counts")
        for content in (big, drip(900)):
            refused = await http.post(REQUESTS, content=content)
            assert refusal(refused) == (503, "overloaded", "1")
            assert "x-should-retry" not in refused.headers, "stock clients come again by themselves"
        for content in (b"x" * 600, b"x" * 100, drip(100)):
            assert (await http.post(REQUESTS, content=content)).status_code == 200
        assert large.open == 900
        site.release.set()
        assert ((await waiting).status_code, large.open) == (200, 0)
        assert (await http.post(REQUESTS, content=drip(900))).status_code == 200
    assert large.open == 0
    async with site_for_large_bodies(reserve=0.5).client() as http:
        refused = await http.post(REQUESTS, content=b"x" * 800)
        assert refusal(refused) == (429, "tenant_limit", "1"), "no tenant takes all room"
        assert (await http.post(REQUESTS, content=b"x" * 700)).status_code == 200


@pytest.mark.parametrize(
    ("path", "setting"),
    [
        (REQUESTS, "`gateway.max_large_body_bytes`; upload a large image to /v1/artifacts"),
        ("/v1/conversations", "`gateway.max_body_bytes`"),
        ("/v1/artifacts", "`artifacts.max_bytes`"),
        ("/v1/requests/bulk", "`gateway.max_batch_bytes`"),
    ],
)
async def test_the_refusal_of_a_large_body_names_the_setting(path: str, setting: str) -> None:
    async with site_for_large_bodies().client() as http:
        answer = await http.post(path, content=b"x" * 3_000_000)
        assert refusal(answer) == (413, "too_large", None)
        assert setting in answer.json()["error"]["message"]


async def test_a_large_body_of_small_parts_is_refused_before_it_is_parsed() -> None:
    rows = b"[" + b",".join([b"{}"] * 800_000) + b"]"
    slashes = b'"' + b"\\/" * 4_200_000 + b'"'
    texts = b'["' + b'","'.join([b"x" * 1_000] * 3_000) + b'"]'
    async with Site(bodies=BodyLimits(max_bytes=2_000_000, max_large_bytes=9_000_000)).client() as http:
        for content, status in ((rows, 413), (slashes, 200), (texts, 200), (rows[:1_900_000], 200)):
            answer = await http.post(REQUESTS, content=content)
            assert answer.status_code == status, answer.text


# What is parsed as JSON on the loop is as small under any path and any content type.
FORMS_100 = ["/v1/artifacts/a/url", "/v1/requests/cancel", CHAT, "/v1/conversations"]


@pytest.mark.parametrize(
    ("path", "headers", "limit"),
    [
        *((path, {}, 100) for path in (REQUESTS, "/v1/images/edits", "/v1/artifacts/a/url", "/v1/tickets")),
        *((path, MULTIPART, 1000) for path in (REQUESTS, "/v1/images/edits", "/v1/artifacts")),
        ("/v1/artifacts", {}, 1000),
        *((path, MULTIPART, 100) for path in FORMS_100),
        ("/v1/nothing", MULTIPART, 64 * 1024),
    ],
)
async def test_a_body_is_as_large_as_its_route_takes(path: str, headers: dict[str, str], limit: int) -> None:
    site = Site()
    site.release.set()
    async with site.client(**headers) as http:
        refused = await http.post(path, content=b"x" * (limit + 1))
        assert refusal(refused) == (413, "too_large", None)
        assert refused.json()["error"]["details"] == {"limit_bytes": limit}
        assert refused.headers["x-should-retry"] == "false"
        whole = await http.post(path, content=b"x" * limit)
        unsaid = await http.post(path, content=drip(limit + 20))
        if path == REQUESTS:
            assert (whole.status_code, unsaid.status_code) == (200, 413)
        assert unsaid.status_code in (413, 404, 405, 200), "what no route reads is not read"


# -- pages


async def test_the_preflight_of_a_stock_client_passes() -> None:
    async with Site().client(origin=PAGE) as http:
        answer = await http.options(CHAT, headers=PREFLIGHT)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        allowed = {name.strip() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert {"x-stainless-arch", "authorization"} <= allowed
    async with Site(origins=()).client() as http:
        answer = await http.get(REQUESTS)
        assert (answer.is_success, "vary" in answer.headers) == (True, False)


@pytest.mark.parametrize("origins", [(), (PAGE,)])
@pytest.mark.parametrize(("origin", "host"), [("https://other.example", "127.0.0.1"), ("null", "localhost")])
async def test_a_page_that_is_not_listed_can_read_why_it_is_refused(
    origins: Sequence[str], origin: str, host: str
) -> None:
    async with Site(origins=origins).client(origin=origin, host=host) as http:
        preflight = await http.options(CHAT, headers=PREFLIGHT)
        refused = await http.post(CHAT, json={})
        foreign_host = await http.get(REQUESTS, headers={"host": "other.example"})
    assert [one.status_code for one in (preflight, refused, foreign_host)] == [200, 403, 403]
    assert {one.headers["access-control-allow-origin"] for one in (preflight, refused, foreign_host)} == {origin}
    assert "auth.allowed_origins" in refused.json()["error"]["message"]
    assert "Origin" in refused.headers["vary"]
    assert "auth.allowed_hosts" in foreign_host.json()["error"]["message"]


OTHERS = ["https://app.example.evil", "https://appxexample", "http://127.0.0.1", None]


@pytest.mark.parametrize("origin", [PAGE, "HTTPS://App.Example/", *OTHERS])
async def test_only_listed_pages_may_read_answers(origin: str | None) -> None:
    allowed = origin not in OTHERS
    async with Site().client(**({} if origin is None else {"origin": origin})) as http:
        asked = await http.options(REQUESTS, headers={"access-control-request-method": "POST"})
        assert (asked.status_code == 200) == (origin is not None)  # without an Origin it is no preflight
        called = await http.get(REQUESTS)
        assert called.is_success == (allowed or origin in (None, "http://127.0.0.1"))
        for answer in (asked, called, await http.get("/healthz")):
            readable = allowed or (origin is not None and (answer is asked or answer.status_code == 403))
            assert answer.headers.get("access-control-allow-origin") == (origin if readable else None)
            assert "Origin" in answer.headers["vary"]
    if allowed:
        assert asked.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
        assert asked.headers["access-control-max-age"] == "600"
        assert "access-control-allow-headers" not in asked.headers


@pytest.mark.parametrize(
    ("limits", "path", "host", "status"),
    [
        (Limits(), REQUESTS, "evil.example", 403),
        (Limits(), "/v1/fails", "127.0.0.1", 500),
        (Limits(streams=0), "/v1/requests/r?wait=1", "127.0.0.1", 429),
        (Limits(), "/v1/nothing", "127.0.0.1", 404),
    ],
)
async def test_a_page_can_read_the_refusals_of_every_layer(limits: Limits, path: str, host: str, status: int) -> None:
    async with Site(defaults=limits).client(origin=PAGE) as http:
        answer = await http.get(path, headers={"host": host})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


# -- exchanges that break off


async def test_an_exchange_that_a_stop_cuts_is_503_with_a_time_to_retry() -> None:
    """The server cancels what is open when the drain's time is over, and would answer with a bare 500."""
    site = Site()
    task = await site.chatting(exchange(site.app, scope_of("POST", CHAT, [(b"content-length", b"0")])))
    task.cancel()
    start, body, *_ = await task
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    message = json.loads(body["body"])["error"]["message"]
    assert "may be accepted" in message, "its record may stand on the topic"
    assert "Idempotency-Key" in message
    assert site.allowances.streams.open == 0


async def test_a_long_poll_whose_body_does_not_come_is_408() -> None:
    site = Site(bodies=BodyLimits(timeout_s=0.05))
    start, *_ = await exchange(site.app, scope_of("GET", "/v1/requests/r1", LENGTH_10, b"wait=9"))
    assert start["status"] == 408


async def test_a_chat_whose_key_is_revoked_is_401(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AuthPolicy, "authenticate", lambda *_: Caller(tenant="t", key_id="k"))
    site = Site()
    task = await site.chatting(exchange(site.app, scope_of("POST", CHAT, [(b"content-length", b"0")])))
    site.is_good = False
    assert site.connections.look() == 1
    assert (await task)[0]["status"] == 401


async def test_a_client_that_leaves_while_it_sends_is_no_incident(caplog: pytest.LogCaptureFixture) -> None:
    leaves = AsyncMock(return_value={"type": "http.disconnect"})
    await exchange(Site().app, scope_of("POST", REQUESTS, LENGTH_10), leaves)
    assert "edge.unexpected" not in caplog.text


# -- errors


FIELDS = {"message", "type", "code", "param", "request_id", "retryable", "details"}
FINAL = {"x-should-retry": "false"}


async def get(error: Exception) -> httpx.Response:
    """The response of an app whose only route raises this error."""
    app = gateway_app()

    @app.get("/")
    async def _fail() -> None:
        raise error

    return await call(app, "GET", "/")


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
    with refused(InvalidRequest, message="priority: must be 0 to 1000, or high, medium or low"):
        validated(PriorityBody, {"priority": 1_001})


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


@pytest.mark.parametrize(("ours", "logged"), [(None, 1001), (4401, 4401)])
async def test_a_closed_socket_is_logged_with_the_code_of_who_closed_it(
    ours: int | None, logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if ours is not None:
            await send({"type": "websocket.close", "code": ours})
        await receive()

    leaves = AsyncMock(return_value={"type": "websocket.disconnect", "code": 1001})
    with caplog.at_level(logging.DEBUG, "penstock"):
        await exchange(Edge(app, app, edge_of(gateway_context())), socket_scope("/v1/ws"), leaves)
    (line,) = (parts_of(one) for one in caplog.records if "socket.closed" in one.getMessage())
    assert line[1]["status"] == logged


async def test_calls_without_a_caller_are_logged_for_debugging_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with Site().client() as client:
        with caplog.at_level(logging.INFO, "penstock"):
            assert (await client.get(REQUESTS, headers={"host": "evil.example"})).status_code == 403
            assert "http.answered" not in caplog.text
            await client.get(REQUESTS)
            assert "http.answered" in caplog.text


async def test_a_refused_socket_confirms_the_subprotocol_so_that_browsers_see_the_code() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await refuse_socket(Unauthenticated("no"), scope, receive, send, close_code=4401)

    accepted, closed = await exchange(app, socket_scope("/", subprotocols=["penstock.v1"]), connects)
    assert (accepted["subprotocol"], closed["code"]) == ("penstock.v1", 4401)
