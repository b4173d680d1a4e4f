"""One line for each HTTP exchange and each WebSocket when it has ended. No path with its ids, no query, no body."""

from __future__ import annotations

import logging
import time

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.common.tracing import context_of
from penstock.gateway.edge.rules import UNKNOWN, WEBSOCKET, Access, Rules
from penstock.gateway.limits.callers import Caller
from penstock.schemas.logs import Fields
from penstock.schemas.topics import HEADER_TRACEPARENT

logger = logging.getLogger(__name__)


def log_answer(scope: Scope, headers: Headers, began_s: float, *, status: int, request_id: str | None = None) -> None:
    """`status`: 0 for an answer that did not begin; of a WebSocket, the close code that came or went first, or 0.

    Probes, scrapes and calls without a caller, as those with a wrong key, are logged at DEBUG.
    """
    state = scope.get("state", {})
    rules: Rules = state.get("rules", UNKNOWN)
    caller: Caller | None = state.get("caller")
    quiet = caller is None or rules.access in (Access.PROBE, Access.SCRAPER)
    level = logging.DEBUG if quiet else logging.INFO
    if not logger.isEnabledFor(level):
        return
    trace = context_of(headers.get(HEADER_TRACEPARENT))
    logger.log(
        level,
        Fields(
            "http.answered" if scope["type"] == "http" else "socket.closed",
            method=scope.get("method", WEBSOCKET),
            route=rules.path or None,
            status=status,
            ms=round((time.monotonic() - began_s) * 1000, 1),
            request_id=request_id,
            tenant=None if caller is None else caller.tenant,
            key_id=None if caller is None else caller.key_id,
            trace_id=None if trace is None else f"{trace.trace_id:032x}",
        ),
    )
