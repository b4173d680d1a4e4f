"""Cross-origin answers: Starlette's CORS around the whole edge.

Pages of `auth.allowed_origins` may read every answer. Any other page may read one: the edge's refusal of its Origin.
Without that a browser shows the page an error with no text.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.edge.exchanges import RawHeaders

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


_OPTIONS: dict[str, Any] = {
    "allow_methods": ("GET", "HEAD", "POST", "DELETE"),
    "allow_headers": ("*",),  # stock clients send `x-stainless-…`; a key in one of them is still needed
    "allow_private_network": True,
    "expose_headers": _EXPOSED,
}


class Cors(CORSMiddleware):
    """Answers preflights. Lets listed pages read every other answer, refusals too."""

    def __init__(self, app: ASGIApp, origins: Set[str]) -> None:
        # Case and closing slashes do not count, as in AuthPolicy.check_origin.
        listed = f"(?i:{'|'.join(map(re.escape, origins))})/*" if origins else "(?!)"
        super().__init__(app, allow_origin_regex=listed, **_OPTIONS)
        self._of_any_page = CORSMiddleware(app, allow_origin_regex=".*", **_OPTIONS)
        self._lists_pages = bool(origins)

    def preflight_response(self, request_headers: Headers) -> Response:
        """The same for every page. A preflight runs nothing, and the edge refuses the call behind it, readably."""
        return self._of_any_page.preflight_response(request_headers)

    async def simple_response(self, scope: Scope, receive: Receive, send: Send, request_headers: Headers) -> None:
        if self._lists_pages or "origin" in request_headers:
            await super().simple_response(scope, receive, send, request_headers)
        else:
            await self.app(scope, receive, send)


def readable_by(origin: str | None) -> RawHeaders:
    """What lets a page of this origin read one answer."""
    return [] if origin is None else [(b"access-control-allow-origin", origin.encode("latin-1"))]
