"""A proxy in front of an S3 server that fails, hangs or is full when it is told to."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
from aiohttp import web

from penstock.common.artifacts import ArtifactStore
from s3_server import Bucket, S3Server
from store_outages import Outage
from system import Process

_LARGEST = 64 << 20
_PER_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding"})
CUT_OFF, RESET = 0, -1
_FAILURES = (500, 503, 403, RESET, CUT_OFF)
_CODES = {500: "InternalError", 503: "SlowDown", 403: "AccessDenied", 507: "XMinioStorageFull"}


class S3Proxy:
    """Listens on a free port of loopback, with a thread of its own; `stop` ends it.

    While it fails, it answers 500, 503 or 403, resets the connection, or passes the call on and then cuts it off
    before the answer: one outage does some of that, another one something else. While it hangs, calls stay open. When
    it heals, half of them are passed on, however late, and half are reset. While it is full, writes are answered with
    507.
    """

    def __init__(self, upstream: str, *, seed: int = 1, failures: Sequence[int] = _FAILURES, only: str = "") -> None:
        """`failures`: the ways to fail that it chooses from: HTTP statuses, RESET and CUT_OFF.

        An outage strikes only calls that have `only` in their URLs.
        """
        self._only = only
        self._upstream = upstream
        self._chance = random.Random(seed)
        self._outage: Outage | None = None
        self._ways = self._failures = list(failures)
        self._healed = asyncio.Event()
        self.struck = Counter[Outage]()
        """Calls that were struck so far, by the kind of the outage."""
        self.url = ""
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._started.wait(20), "the proxy does not listen"

    def begin(self, outage: Outage) -> None:
        self._failures = self._chance.sample(self._ways, self._chance.randint(1, len(self._ways)))
        self._healed, self._outage = asyncio.Event(), outage

    def heal(self) -> None:
        self._outage = None
        self._loop.call_soon_threadsafe(self._healed.set)

    def stop(self) -> None:
        self.heal()
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application(client_max_size=_LARGEST)
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(auto_decompress=False, connector=connector) as self._session:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            self._started.set()
            await self._over.wait()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body, outage = await request.read(), self._outage if self._only in request.raw_path else None
        if outage is None or (outage == "fills" and request.method in ("GET", "HEAD")):
            return await self._passed_on(request, body)
        self.struck[outage] += 1
        if outage == "hangs":
            await self._healed.wait()
            late = self._chance.random() < 0.5
            return await self._passed_on(request, body) if late else _reset(request)
        status = 507 if outage == "fills" else self._chance.choice(self._failures)
        if status == CUT_OFF:
            await self._passed_on(request, body)
        if status in (CUT_OFF, RESET):
            return _reset(request)
        text = f"<Error><Code>{_CODES[status]}</Code><Message>an outage of the test</Message></Error>"
        return web.Response(status=status, text=text, content_type="application/xml")

    async def _passed_on(self, request: web.Request, body: bytes) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _PER_HOP}
        url = self._upstream + request.raw_path
        async with self._session.request(request.method, url, headers=headers, data=body) as answer:
            content = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _PER_HOP}
            return web.Response(status=answer.status, body=content, headers=kept)


def _reset(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()


class BreakableS3:
    """A bucket of a real S3 server behind a proxy."""

    blocks_exit = False

    def __init__(self, *, seed: int = 1, failures: Sequence[int] = _FAILURES, **options: str) -> None:
        """`failures`: as of S3Proxy. `options`: further ones of the client, such as its `timeout`."""
        self._server = S3Server()
        self._bucket: Bucket = self._server.bucket()
        self._proxy = S3Proxy(self._server.url, seed=seed, failures=failures)
        self.begin: Callable[[Outage], None] = self._proxy.begin
        self.heal: Callable[[], None] = self._proxy.heal
        proxied = replace(self._bucket, options={**self._bucket.options, "aws_endpoint": self._proxy.url, **options})
        self.env = {
            "PENSTOCK_WORKER__ARTIFACTS_DIR": proxied.location,
            "PENSTOCK_GATEWAY__ARTIFACTS_DIR": proxied.location,
            "PENSTOCK_ARTIFACTS__OPTIONS": json.dumps(proxied.options),
        }

    def struck(self, outage: Outage, workers: Sequence[Process]) -> int:
        return self._proxy.struck[outage]

    def direct(self, **settings: Any) -> ArtifactStore:
        return ArtifactStore(self._bucket.location, options=self._bucket.options, **settings)

    def stop(self) -> None:
        with suppress(RuntimeError):
            self._proxy.stop()
        self._server.stop()
