"""Limits: the bucket never gives more than its rate, bodies stop at their limit, newcomers are shed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from penstock.gateway.callers import Caller
from penstock.gateway.errors import install_error_handlers
from penstock.gateway.limits import (
    BodyLimitMiddleware,
    BodyLimits,
    ConcurrencyMiddleware,
    RateLimiter,
    RateMiddleware,
    TokenBucket,
)
from penstock.schemas.errors import TenantLimit
from support import wait_until_async


@given(st.floats(0.1, 100), st.integers(1, 20), st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=60))
def test_the_bucket_gives_no_more_than_burst_and_rate(rate: float, burst: int, gaps: list[float]) -> None:
    bucket, now, given_out = TokenBucket(rate, burst, 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        wait = bucket.take(now)
        given_out += wait == 0.0
        assert given_out <= burst + rate * now + 1e-6
        if wait:
            assert bucket.take(now + wait + 1e-9) == 0.0, "the wait that was told is enough"
            given_out += 1
            now += wait + 1e-9


def test_a_key_over_its_rate_is_told_how_long_to_wait() -> None:
    now = [0.0]
    limiter = RateLimiter(lambda: now[0])
    slow, other = Caller(key_id="a", rate=0.5), Caller(key_id="b", rate=0.5)
    limiter.charge(slow)
    with pytest.raises(TenantLimit) as caught:
        limiter.charge(slow)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    limiter.charge(other)
    for _ in range(100):
        limiter.charge(Caller())
    now[0] = 2.0
    limiter.charge(slow)


def test_idle_keys_are_forgotten() -> None:
    now = [0.0]
    limiter = RateLimiter(lambda: now[0], max_keys=10)
    for n in range(100):
        now[0] += 10
        limiter.charge(Caller(key_id=str(n), rate=1.0))
    assert len(limiter._buckets) <= 11  # pyright: ignore[reportPrivateUsage]


def body_app() -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)

    @app.post("/json")
    async def _json(body: dict[str, str]) -> int:  # pyright: ignore[reportUnusedFunction]
        return len(body)

    @app.post("/artifacts/raw")
    async def _raw(request: Request) -> int:  # pyright: ignore[reportUnusedFunction]
        return len(await request.body())

    app.add_middleware(BodyLimitMiddleware, limits=BodyLimits(max_bytes=100, by_prefix={"/artifacts": 1000}))
    return app


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


async def drip(total: int) -> AsyncIterator[bytes]:
    yield b'{"a": "'
    for _ in range(total // 10):
        yield b"x" * 10
    yield b'"}'


async def test_bodies_stop_at_their_limit() -> None:
    async with client(body_app()) as http:
        assert (await http.post("/json", json={"a": "b"})).status_code == 200
        declared = await http.post("/json", json={"a": "x" * 200})
        streamed = await http.post("/json", content=drip(200), headers={"content-type": "application/json"})
        for answer in (declared, streamed):
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "too_large"
            assert answer.json()["error"]["details"] == {"limit_bytes": 100}
            assert answer.headers["x-should-retry"] == "false"
        assert (await http.post("/artifacts/raw", content=b"x" * 1000)).json() == 1000
        assert (await http.post("/artifacts/raw", content=drip(1100))).status_code == 413


async def test_the_middleware_charges_submissions_only() -> None:
    caller = Caller(key_id="a", rate=1.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    limited = RateMiddleware(app, RateLimiter(lambda: 0.0))

    async def with_caller(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["caller"] = caller
        await limited(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(with_caller), base_url="http://x") as http:
        assert (await http.post("/")).status_code == 200
        refused = await http.post("/")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "tenant_limit"
        assert refused.headers["retry-after"] == "1"
        assert "x-should-retry" not in refused.headers
        assert (await http.get("/")).status_code == 200
        assert (await http.post("/v1/requests/r/cancel")).status_code == 200


async def test_beyond_the_limit_newcomers_are_shed_and_probes_are_not() -> None:
    release = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    shed = ConcurrencyMiddleware(app, max_http=2, max_sockets=0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(shed), base_url="http://x") as http:
        slow = [asyncio.create_task(http.get("/slow")) for _ in range(2)]
        await wait_until_async(lambda: shed.open_http == 2)
        refused = await http.get("/other")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert (await http.get("/healthz")).status_code == 200
        release.set()
        assert [answer.status_code for answer in await asyncio.gather(*slow)] == [200, 200]
        assert (await http.get("/other")).status_code == 200

    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await shed({"type": "websocket", "path": "/v1/ws", "headers": []}, receive, send)
    assert [m["type"] for m in sent] == ["websocket.accept", "websocket.close"]
    assert sent[-1]["code"] == 1013
