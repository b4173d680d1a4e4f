"""The edge put together: every middleware in its order, error handlers and the edge's own state, on one app."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from penstock.gateway.auth import AuthMiddleware, AuthPolicy, OriginMiddleware
from penstock.gateway.errors import ErrorBoundary, install_error_handlers
from penstock.gateway.limits import (
    BodyLimitMiddleware,
    BodyLimits,
    ConcurrencyMiddleware,
    RateLimiter,
    RateMiddleware,
)
from penstock.gateway.openapi import polish_openapi
from penstock.gateway.tickets import mask_access_logs


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeLimits:
    """Bodies in bytes; connections open at one time."""

    body: BodyLimits = field(
        default_factory=lambda: BodyLimits(max_bytes=2_000_000, by_prefix={"/v1/artifacts": 64 * 1024 * 1024})
    )
    max_http: int = 4_096
    max_sockets: int = 4_096


def install_edge(app: FastAPI, policy: AuthPolicy, limiter: RateLimiter, limits: EdgeLimits | None = None) -> None:
    """Set up middleware and error handlers. Call it once."""
    limits = limits or EdgeLimits()
    install_error_handlers(app)
    polish_openapi(app)
    mask_access_logs()
    # Starlette puts the last one added outermost: read this list from the route outwards.
    app.add_middleware(RateMiddleware, limiter=limiter)
    app.add_middleware(BodyLimitMiddleware, limits=limits.body)
    app.add_middleware(AuthMiddleware, policy=policy)
    if policy.allowed_origins:
        # Outside of auth: a preflight carries no key. Inside of the Origin check: others get no answer at all.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(policy.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["authorization", "content-type", "idempotency-key", "last-event-id", "x-api-key"],
            expose_headers=["x-request-id", "x-should-retry", "retry-after", "location", "idempotency-replayed"],
        )
    app.add_middleware(OriginMiddleware, policy=policy)
    app.add_middleware(ConcurrencyMiddleware, max_http=limits.max_http, max_sockets=limits.max_sockets)
    app.add_middleware(ErrorBoundary)
