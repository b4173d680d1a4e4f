"""Cross-origin answers for the pages on the list: the preflight, and the headers of every answer, refusals too."""

from __future__ import annotations

import re
from collections.abc import Set

from starlette.datastructures import Headers
from starlette.responses import Response

_METHODS = "GET, HEAD, POST, DELETE"
_EXPOSED = ", ".join(
    [
        "x-request-id",
        "x-should-retry",
        "retry-after",
        "location",
        "idempotency-replayed",
        *(f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in ("limit", "remaining", "reset")),
    ]
)
_PREFLIGHT_AGE_S = 600
_HEADER_NAMES = re.compile(r"[\w\-., ]+", re.ASCII)

RawHeaders = list[tuple[bytes, bytes]]


class Cors:
    """Knows the origins that are allowed; all others get no header of it."""

    def __init__(self, origins: Set[str]) -> None:
        self._origins = origins

    def headers(self, headers: Headers) -> RawHeaders:
        """What every answer to this request carries."""
        origin = headers.get("origin")
        if not self._origins:
            return []
        if origin is None or origin.rstrip("/").lower() not in self._origins:
            return [(b"vary", b"Origin")]
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", _EXPOSED.encode()),
            (b"vary", b"Origin"),
        ]

    def preflight(self, method: str, headers: Headers) -> Response | None:
        """The answer to a preflight of an allowed page; None for anything else.

        Any header may be asked for (stock clients send `x-stainless-…`): a key in one of them is still needed.
        """
        origin = headers.get("origin")
        asked = headers.get("access-control-request-method")
        if method != "OPTIONS" or asked is None or origin is None or origin.rstrip("/").lower() not in self._origins:
            return None
        answer = {"access-control-allow-methods": _METHODS, "access-control-max-age": str(_PREFLIGHT_AGE_S)}
        wanted = headers.get("access-control-request-headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            answer["access-control-allow-headers"] = wanted
        return Response(status_code=200, headers=answer)
