"""The edge: limits and CORS on every answer, refusals of every layer included."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from gateway_parts import routes_with
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.connections import Connections
from penstock.gateway.edge.disconnects import unless_gone
from penstock.gateway.edge.edge import EdgeParts, install_edge
from penstock.gateway.edge.rules import Rules
from penstock.gateway.limits.allowances import Allowances, Totals
from penstock.gateway.limits.callers import ANYBODY, Caller, caller_of
from penstock.gateway.limits.limits import Limits
from penstock.schemas.errors import BrokerUnavailable, PenstockError
from support import wait_until_async

Headers = list[tuple[bytes, bytes]]
PAGE = "https://app.example"
STAINLESS = "authorization, content-type, x-stainless-arch, x-stainless-os, x-stainless-retry-count"


def make_app(
    allowances: Allowances | None = None,
    awaited: Callable[[str | None], PenstockError | None] = lambda _: None,
    body_timeout_s: float = 30.0,
    origins: Sequence[str] = (PAGE,),
    bodies: BodyLimits | None = None,
) -> FastAPI:
    app = FastAPI()
    release = app.state.release = asyncio.Event()

    @app.api_route("/v1/requests", methods=["GET", "POST"])
    async def _requests(request: Request) -> str:  # pyright: ignore[reportUnusedFunction]
        await request.body()
        return caller_of(request).tenant

    @app.post("/v1/chat/completions")
    async def _chat() -> str:  # pyright: ignore[reportUnusedFunction]
        await release.wait()
        return "done"

    @app.get("/v1/fails")
    async def _fails() -> None:  # pyright: ignore[reportUnusedFunction]
        raise RuntimeError("secret")

    @app.get("/healthz")
    async def _healthz() -> str:  # pyright: ignore[reportUnusedFunction]
        return "ok"

    policy = AuthPolicy.build(allowed_origins=origins)
    install_edge(
        app,
        EdgeParts(
            routes=routes_with(
                {("GET", "/v1/fails"): Rules(scope="read"), ("GET", "/v1/nothing"): Rules(scope="read")}
            ),
            policy=policy,
            allowances=allowances or Allowances(),
            connections=Connections(policy.still_good),
            bodies=bodies or BodyLimits(max_bytes=100, max_file_bytes=1000, timeout_s=body_timeout_s),
            awaited=awaited,
        ),
    )
    return app


def client(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", headers=headers)


async def test_submissions_carry_the_limit_as_openai_tells_it() -> None:
    allowances = Allowances(defaults=Limits(requests_per_s=2, tokens_per_minute=600), clock=lambda: 0.0)
    async with client(make_app(allowances)) as http:
        answers = [await http.post("/v1/requests") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        refused = answers[-1]
        assert refused.json()["error"]["code"] == "tenant_limit"
        assert refused.json()["error"]["details"] == {"limit": "requests_per_s", "value": 2}
        assert refused.headers["retry-after"] == "1"
        assert "x-should-retry" not in refused.headers
        for answer in answers:
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-limit-tokens"] == "600"
            assert answer.headers["x-ratelimit-remaining-tokens"] == "600"
            assert answer.headers["x-ratelimit-reset-tokens"] == "0ms"
        read = await http.get("/v1/requests")
        assert read.status_code == 200
        assert "x-ratelimit-limit-requests" not in read.headers


async def test_calls_of_every_kind_count_and_probes_do_not() -> None:
    async with client(make_app(Allowances(defaults=Limits(calls_per_s=2), clock=lambda: 0.0))) as http:
        assert [(await http.get("/v1/requests")).status_code for _ in range(3)] == [200, 200, 429]
        assert (await http.get("/healthz")).status_code == 200


async def test_waiting_exchanges_have_slots_of_their_own_and_others_go_on() -> None:
    app = make_app(Allowances(defaults=Limits(streams=2), totals=Totals(max_http=4)))
    async with client(app) as http:
        waiting = [asyncio.create_task(http.post("/v1/chat/completions")) for _ in range(2)]
        await asyncio.sleep(0)
        await wait_until_async(lambda: open_streams(app) == 2)
        refused = await http.post("/v1/chat/completions")
        assert (refused.status_code, refused.json()["error"]["details"]["value"]) == (429, 2)
        assert (await http.get("/v1/requests")).status_code == 200
        app.state.release.set()
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
        assert (await http.post("/v1/chat/completions")).status_code == 200
    assert open_streams(app) == 0


def open_streams(app: FastAPI) -> int:
    """Counted by the edge of this app."""
    return edge_of(app)._allowances.streams.open


def edge_of(app: FastAPI) -> Any:
    """It stands behind the answers for pages."""
    cors: Any = app.middleware_stack
    return cors.app


async def test_beyond_the_limit_newcomers_are_shed_and_probes_are_not() -> None:
    app = make_app(Allowances(totals=Totals(max_http=1)))
    async with client(app) as http:
        waiting = asyncio.create_task(http.post("/v1/chat/completions"))
        await wait_until_async(lambda: app.middleware_stack is not None and open_streams(app) == 1)
        refused = await http.get("/v1/requests")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert (await http.get("/healthz")).status_code == 200
        app.state.release.set()
        assert (await waiting).status_code == 200


async def drip(total: int) -> Any:
    for _ in range(total // 10):
        yield b"x" * 10


async def test_bodies_stop_at_their_limit() -> None:
    async with client(make_app()) as http:
        assert (await http.post("/v1/requests", content=b"x" * 100)).status_code == 200
        for answer in (
            await http.post("/v1/requests", content=b"x" * 101),
            await http.post("/v1/requests", content=drip(200)),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
            assert answer.json()["error"]["details"] == {"limit_bytes": 100}
            assert answer.headers["x-should-retry"] == "false"


def large(app: FastAPI) -> Any:
    return edge_of(app)._allowances.large_bodies


def make_large_app(**totals: Any) -> FastAPI:
    bodies = BodyLimits(max_bytes=100, max_large_bytes=1_000)
    return make_app(Allowances(totals=Totals(large_bodies_bytes=1_500, **totals)), bodies=bodies)


async def test_a_large_body_is_taken_while_there_is_room_in_memory() -> None:
    app = make_large_app()
    big = b'"' + b"x" * 898 + b'"'
    async with client(app) as http:
        waiting = asyncio.create_task(http.post("/v1/chat/completions", content=big))
        await wait_until_async(lambda: app.middleware_stack is not None and large(app).open == 900)
        for content in (big, drip(900)):
            refused = await http.post("/v1/requests", content=content)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded"), refused.text
            assert refused.headers["retry-after"] == "1"
            assert "x-should-retry" not in refused.headers, "stock clients come again by themselves"
        for content in (b"x" * 600, b"x" * 100, drip(100)):
            assert (await http.post("/v1/requests", content=content)).status_code == 200
        assert large(app).open == 900
        app.state.release.set()
        assert (await waiting).status_code == 200
        assert large(app).open == 0
        assert (await http.post("/v1/requests", content=drip(900))).status_code == 200
    assert large(app).open == 0


async def test_no_tenant_takes_all_room_for_large_bodies() -> None:
    app = make_large_app(reserve=0.5)
    async with client(app) as http:
        refused = await http.post("/v1/requests", content=b"x" * 800)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert (await http.post("/v1/requests", content=b"x" * 700)).status_code == 200


async def test_a_body_that_is_too_large_hears_what_the_limit_is_called() -> None:
    async with client(make_large_app()) as http:
        for path, setting in (
            ("/v1/requests", "`gateway.max_large_body_bytes`; upload a large image to /v1/artifacts"),
            ("/v1/conversations", "`gateway.max_body_bytes`"),
            ("/v1/artifacts", "`artifacts.max_bytes`"),
            ("/v1/requests/bulk", "`gateway.max_batch_bytes`"),
        ):
            answer = await http.post(path, content=b"x" * 3_000_000)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
            assert setting in answer.json()["error"]["message"]


async def test_a_large_body_of_small_parts_is_refused_before_it_is_parsed() -> None:
    """86 MB of it stopped a gateway for ten seconds."""
    limits = BodyLimits(max_bytes=2_000_000, max_large_bytes=9_000_000)
    rows = b"[" + b",".join([b"{}"] * 800_000) + b"]"
    slashes = b'"' + b"\\/" * 4_200_000 + b'"'
    texts = b'["' + b'","'.join([b"x" * 1_000] * 3_000) + b'"]'
    async with client(make_app(bodies=limits)) as http:
        for content, status in ((rows, 413), (slashes, 200), (texts, 200)):
            answer = await http.post("/v1/requests", content=content)
            assert answer.status_code == status, answer.text
        assert (await http.post("/v1/requests", content=rows[:1_900_000])).status_code == 200, "as ever"


async def test_while_the_broker_is_awaited_callers_hear_so() -> None:
    async with client(make_app(awaited=lambda _: BrokerUnavailable("not yet", retry_after_s=1))) as http:
        refused = await http.get("/v1/requests")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
        assert (await http.get("/healthz")).status_code == 200


async def test_the_preflight_of_a_stock_client_passes() -> None:
    asked = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": STAINLESS}
    async with client(make_app()) as http:
        answer = await http.options("/v1/chat/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        allowed = {name.strip() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert {"x-stainless-arch", "authorization"} <= allowed


@pytest.mark.parametrize("origins", [(), (PAGE,)])
@pytest.mark.parametrize(("origin", "host"), [("https://other.example", "127.0.0.1"), ("null", "localhost")])
async def test_a_page_that_is_not_listed_can_read_why_it_is_refused(
    origins: Sequence[str], origin: str, host: str
) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": STAINLESS}
    async with client(make_app(origins=origins), origin=origin, host=host) as http:
        preflight = await http.options("/v1/chat/completions", headers=asked)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, origin)
        refused = await http.post("/v1/chat/completions", json={})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (403, origin)
        assert "auth.allowed_origins" in refused.json()["error"]["message"]
        assert "Origin" in refused.headers["vary"]
        foreign_host = await http.get("/v1/requests", headers={"host": "other.example"})
        assert foreign_host.headers["access-control-allow-origin"] == origin
        assert "auth.allowed_hosts" in foreign_host.json()["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (PAGE, True),
        ("HTTPS://App.Example/", True),
        ("https://app.example.evil", False),
        ("https://appxexample", False),
        ("http://127.0.0.1", False),
        (None, False),
    ],
)
async def test_only_listed_pages_may_read_answers(origin: str | None, allowed: bool) -> None:
    headers = {} if origin is None else {"origin": origin}
    async with client(make_app(), **headers) as http:
        asked = await http.options("/v1/requests", headers={"access-control-request-method": "POST"})
        assert (asked.status_code == 200) == (origin is not None)  # without an Origin it is no preflight
        called = await http.get("/v1/requests")
        assert called.is_success == (allowed or origin in (None, "http://127.0.0.1"))
        for answer in (asked, called, await http.get("/healthz")):
            readable = allowed or (origin is not None and (answer is asked or answer.status_code == 403))
            assert answer.headers.get("access-control-allow-origin") == (origin if readable else None)
            assert "Origin" in answer.headers["vary"]
        if allowed:
            assert asked.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
            assert asked.headers["access-control-max-age"] == "600"
            assert "access-control-allow-headers" not in asked.headers


async def test_without_listed_pages_answers_say_nothing_of_origins() -> None:
    async with client(make_app(origins=())) as http:
        answer = await http.get("/v1/requests")
        assert answer.is_success
        assert "vary" not in answer.headers


@pytest.mark.parametrize(
    ("limits", "path", "headers", "status"),
    [
        (Limits(), "/v1/requests", {"host": "evil.example"}, 403),
        (Limits(), "/v1/fails", {}, 500),
        (Limits(streams=0), "/v1/requests/r?wait=1", {}, 429),
        (Limits(), "/v1/nothing", {}, 404),
    ],
)
async def test_refusals_of_every_layer_can_be_read_by_the_page(
    limits: Limits, path: str, headers: dict[str, str], status: int
) -> None:
    async with client(make_app(Allowances(defaults=limits)), origin=PAGE) as http:
        answer = await http.get(path, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_a_gateway_that_waits_for_its_broker_can_be_read_by_the_page_too() -> None:
    async with client(make_app(awaited=lambda _: BrokerUnavailable("not yet")), origin=PAGE) as http:
        answer = await http.get("/v1/requests")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (503, PAGE)


def test_nobody_is_limited_by_default() -> None:
    assert ANYBODY.limits == Limits()


# -- the server's own messages, as uvicorn gives them


Messages = list[dict[str, Any]]


async def exchange(app: FastAPI, method: str, path: str, query: bytes, headers: Headers, receive: Any) -> Messages:
    """What the edge sends for one exchange."""
    sent: Messages = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": [(b"host", b"127.0.0.1"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
    }
    try:
        await app(scope, receive, send)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        assert current is not None
        current.uncancel()
    return sent


def status(sent: Messages) -> int:
    return next(message["status"] for message in sent if message["type"] == "http.response.start")


async def nothing_comes() -> Any:
    await asyncio.Event().wait()


async def test_what_a_stop_cuts_is_503_with_a_time_to_come_again() -> None:
    """The server cancels what is open when the drain's time is over, and would say a bare 500."""
    app = make_app()
    task = asyncio.create_task(
        exchange(app, "POST", "/v1/chat/completions", b"", [(b"content-length", b"0")], nothing_comes)
    )
    await wait_until_async(lambda: app.middleware_stack is not None and open_streams(app) == 1)
    task.cancel()
    sent = await task
    assert status(sent) == 503
    assert (b"retry-after", b"1") in sent[0]["headers"]
    error = json.loads(sent[1]["body"])["error"]
    assert "may be accepted" in error["message"], "its record may stand on the topic"
    assert "Idempotency-Key" in error["message"]
    assert open_streams(app) == 0


async def test_a_long_poll_whose_body_does_not_come_is_408() -> None:
    """It was taken for a client that has gone, and the server said a bare 500."""
    app = make_app(body_timeout_s=0.05)
    sent = await exchange(app, "GET", "/v1/requests/r1", b"wait=9", [(b"content-length", b"10")], nothing_comes)
    assert status(sent) == 408


async def test_a_client_that_leaves_while_it_sends_is_no_incident(caplog: pytest.LogCaptureFixture) -> None:
    async def leaves() -> Any:
        return {"type": "http.disconnect"}

    await exchange(make_app(), "POST", "/v1/requests", b"", [(b"content-length", b"10")], leaves)
    assert "edge.unexpected" not in caplog.text


async def test_a_chat_whose_key_is_taken_back_is_401(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an empty 499, to a client that is still there."""
    app = make_app()
    monkeypatch.setattr(AuthPolicy, "authenticate", lambda *_: Caller(tenant="t", key_id="k"))

    @app.post("/v1/completions")
    async def _waits(request: Request) -> str:  # pyright: ignore[reportUnusedFunction]
        return await unless_gone(request.receive, asyncio.Event().wait()) and ""

    task = asyncio.create_task(
        exchange(app, "POST", "/v1/completions", b"", [(b"content-length", b"0")], nothing_comes)
    )
    await wait_until_async(lambda: app.middleware_stack is not None and open_streams(app) == 1)
    edge = edge_of(app)
    monkeypatch.setattr(edge._parts.connections, "_still_good", lambda caller: False)
    assert edge._parts.connections.look() == 1
    assert status(await task) == 401


async def test_an_address_takes_its_share_of_public_slots_and_a_scraper_needs_none() -> None:
    allowances = Allowances(totals=Totals(max_public=2, max_public_of_one=1))
    taken = allowances.open_public("127.0.0.1")
    async with client(make_app(allowances)) as http:
        assert (await http.get("/registry/subjects")).status_code == 429
        taken()
        assert (await http.get("/registry/subjects")).status_code == 404, "this app has none"
        for address in ("a", "b"):
            allowances.open_public(address)
        assert (await http.get("/registry/subjects")).status_code == 503
        assert (await http.get("/metrics")).status_code == 404
        assert (await http.request("GET", "/metrics", content=b"x")).status_code == 503
    assert allowances.public.open == 2


MULTIPART = {"content-type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("path", "headers", "limit"),
    [
        ("/v1/requests", {}, 100),
        ("/v1/requests", MULTIPART, 1000),
        ("/v1/images/edits", MULTIPART, 1000),
        ("/v1/images/edits", {}, 100),
        ("/v1/artifacts", {}, 1000),
        ("/v1/artifacts", MULTIPART, 1000),
        # What is parsed as JSON on the loop is as small under any path and any content type.
        ("/v1/artifacts/a/url", {}, 100),
        ("/v1/artifacts/a/url", MULTIPART, 100),
        ("/v1/requests/cancel", MULTIPART, 100),
        ("/v1/chat/completions", MULTIPART, 100),
        ("/v1/conversations", MULTIPART, 100),
        ("/v1/tickets", {}, 100),
        ("/v1/nothing", MULTIPART, 64 * 1024),
    ],
)
async def test_a_body_is_as_large_as_its_route_takes(path: str, headers: dict[str, str], limit: int) -> None:
    """86 MiB of JSON to an artifact's `url`, or as multipart to any route, stopped a gateway for ten seconds."""
    app = make_app()
    app.state.release.set()
    async with client(app, **headers) as http:
        refused = await http.post(path, content=b"x" * (limit + 1))
        assert (refused.status_code, refused.json()["error"]["details"]) == (413, {"limit_bytes": limit})
        unsaid = await http.post(path, content=drip(limit + 20))
        assert unsaid.status_code in (413, 404, 405, 200), "what no route reads is not read"
