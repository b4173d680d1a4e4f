"""What this gateway reports of itself while it runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.gateway.context import GatewayContext
from penstock.gateway.routes.health import readiness_of
from penstock.gateway.view.follower import Follower

MOST_LAGGING = 20
"""Topics that are named with their lag, those with the most first."""
_VIEW_FILES = [f"{name}{end}" for name in ("", ".imported") for end in ("", "-wal", "-shm")]


def own_state(context: GatewayContext, follower: Follower) -> dict[str, Any]:
    """The fields of GatewayState that change."""
    body, _ = readiness_of(context, for_operators=True)
    lag = sorted(follower.lag.items(), key=lambda item: (-item[1], item[0]))
    return {
        "status": "draining" if context.draining else body["status"],
        "reason": body["reason"],
        "lag": dict(lag[:MOST_LAGGING]),
        "streams": context.allowances.streams.open,
        "sockets": context.allowances.sockets.open,
        "http_requests": context.allowances.http.open,
        "view_bytes": _size(context.settings.gateway.view_path),
    }


def _size(view: Path) -> int:
    size_bytes = 0
    for end in _VIEW_FILES:
        with suppress(OSError):  # SQLite makes and removes these as it likes
            size_bytes += view.with_name(view.name + end).stat().st_size
    return size_bytes
