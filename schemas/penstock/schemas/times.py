"""Times as callers read them."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(time_ms: int) -> str | None:
    """Milliseconds since the epoch as RFC 3339 in UTC; None for an unknown time."""
    if time_ms <= 0:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
