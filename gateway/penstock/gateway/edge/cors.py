"""Cross-origin answers for the pages of `auth.allowed_origins`: Starlette's CORS around the whole edge."""

from __future__ import annotations

import re
from collections.abc import Set

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_LIMITS = (f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in ("limit", "remaining", "reset"))
_EXPOSED = (
    "x-request-id",
    "x-should-retry",
    "retry-after",
    "location",
    "idempotency-replayed",
    "penstock-ignored-fields",
    *_LIMITS,
)


class Cors(CORSMiddleware):
    """Answers the preflights of listed pages. Lets them read every other answer, refusals too."""

    def __init__(self, app: ASGIApp, origins: Set[str]) -> None:
        super().__init__(
            app,
            # Case and closing slashes do not count, as in AuthPolicy.check_origin.
            allow_origin_regex=f"(?i:{'|'.join(map(re.escape, origins))})/*",
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),  # stock clients send `x-stainless-…`; a key in one of them is still needed
            allow_private_network=True,
            expose_headers=_EXPOSED,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "OPTIONS":
            headers = Headers(scope=scope)
            if not self.is_allowed_origin(headers.get("origin", "")):  # the edge refuses it like any other call
                await self.simple_response(scope, receive, send, headers)
                return
        await super().__call__(scope, receive, send)
