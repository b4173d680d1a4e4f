"""Limits of the edge: body size, submissions per key and open connections, refused before memory grows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.auth import needed_scope
from penstock.gateway.callers import Caller
from penstock.gateway.errors import CLOSE_OVERLOADED, EdgeRefusal, refuse
from penstock.schemas.errors import Overloaded, PenstockError, TenantLimit, TooLarge

logger = logging.getLogger(__name__)

_UNLIMITED_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_S = 10.0


class TokenBucket:
    """Permits that refill at `rate` per second up to `burst`; time is passed in, in seconds."""

    __slots__ = ("_burst", "_level", "_rate", "_updated_at")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._updated_at = now

    def take(self, now: float) -> float:
        """Take one permit: 0.0, or how many seconds until there is one (nothing is taken then)."""
        self._refill(now)
        if self._level >= 1:
            self._level -= 1
            return 0.0
        return (1 - self._level) / self._rate

    def is_full(self, now: float) -> bool:
        self._refill(now)
        return self._level >= self._burst

    def _refill(self, now: float) -> None:
        passed = max(0.0, now - self._updated_at)
        self._updated_at = max(self._updated_at, now)
        self._level = min(self._burst, self._level + passed * self._rate)


class RateLimiter:
    """One bucket per key. A burst is one second's worth, at least one request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_keys: int = 10_000) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._buckets: dict[tuple[str | None, float], TokenBucket] = {}

    def charge(self, caller: Caller) -> None:
        """Count one submission; a socket calls this per submit frame. Raises TenantLimit with the wait."""
        if caller.rate is None:
            return
        now = self._clock()
        # The rate is part of the key, so that a changed keys file takes effect at once.
        key = (caller.key_id, caller.rate)
        bucket = self._buckets.get(key)
        if bucket is None:
            self._forget_idle(now)
            bucket = self._buckets[key] = TokenBucket(caller.rate, max(1.0, caller.rate), now)
        wait_s = bucket.take(now)
        if wait_s > 0:
            raise TenantLimit(f"this key may submit {caller.rate:g} requests per second", retry_after_s=wait_s)

    def _forget_idle(self, now: float) -> None:
        # A full bucket is the same as none.
        if len(self._buckets) >= self._max_keys:
            self._buckets = {key: bucket for key, bucket in self._buckets.items() if not bucket.is_full(now)}


class RateMiddleware:
    """Charges each submission of a caller with a rate. Stands behind AuthMiddleware."""

    def __init__(self, app: ASGIApp, limiter: RateLimiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope.get("state", {}).get("caller")
        submits = scope["type"] == "http" and needed_scope(scope["method"], scope["path"]) == "submit"
        if submits and isinstance(caller, Caller):
            try:
                self._limiter.charge(caller)
            except PenstockError as error:
                await refuse(error, scope, receive, send, close_code=CLOSE_OVERLOADED)
                return
        await self._app(scope, receive, send)


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """The largest body in bytes, and exceptions by path prefix (artifacts are larger than requests)."""

    max_bytes: int
    by_prefix: Mapping[str, int]

    def of(self, path: str) -> int:
        return next((limit for prefix, limit in self.by_prefix.items() if path.startswith(prefix)), self.max_bytes)


class BodyLimitMiddleware:
    """413 for a body over its limit: at once by its content-length, else as soon as the bytes that came exceed it."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limits.of(scope["path"])
        error = TooLarge(f"the body is larger than {limit} bytes", details={"limit_bytes": limit})
        declared = _declared_length(scope)
        if declared is not None and declared <= limit:
            await self._app(scope, receive, send)  # the server reads no more than was declared
            return
        if declared is not None:
            await _discard_body(scope, receive)
            await refuse(error, scope, receive, send, close_code=CLOSE_OVERLOADED)
            return
        counted, started = 0, False

        async def limited_receive() -> Message:
            nonlocal counted
            message = await receive()
            counted += len(message.get("body", b""))
            if counted > limit:
                raise EdgeRefusal(error)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, limited_receive, watched_send)
        except EdgeRefusal:
            if started:
                raise
            await refuse(error, scope, receive, send, close_code=CLOSE_OVERLOADED)


class ConcurrencyMiddleware:
    """Sheds load: beyond so many open HTTP exchanges or sockets a newcomer gets 503 `overloaded`, or 1013."""

    def __init__(self, app: ASGIApp, *, max_http: int, max_sockets: int) -> None:
        self._app = app
        self._limits = {"http": max_http, "websocket": max_sockets}
        self._open = {"http": 0, "websocket": 0}

    @property
    def open_http(self) -> int:
        return self._open["http"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind not in self._open or scope["path"] in _UNLIMITED_PATHS:
            await self._app(scope, receive, send)
            return
        if self._open[kind] >= self._limits[kind]:
            logger.warning("edge.shed kind=%s open=%d", kind, self._open[kind])
            error = Overloaded("the gateway has too many connections open", retry_after_s=1)
            await refuse(error, scope, receive, send, close_code=CLOSE_OVERLOADED)
            return
        self._open[kind] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[kind] -= 1


def _declared_length(scope: Scope) -> int | None:
    """Bytes that follow, if the request says so. With a transfer-encoding it does not, whatever else it says."""
    found: int | None = None
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length" and value.isdigit():
            found = int(value)
    return 0 if found is None and scope["method"] in ("GET", "HEAD") else found


async def _discard_body(scope: Scope, receive: Receive) -> None:
    """Read the body away, within limits, keeping nothing: most clients look for an answer only when they have sent all.

    Without this they see a reset connection where the 413 should be.
    """
    if "expect" in Headers(scope=scope):
        return
    discarded = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while discarded < _DRAIN_BYTES:
                message = await receive()
                discarded += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
