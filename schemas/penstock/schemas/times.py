"""Times as callers read them."""

from __future__ import annotations

from datetime import UTC, datetime

from penstock.schemas.errors import InvalidRequest


def rfc3339(time_ms: int) -> str | None:
    """Milliseconds since the epoch as RFC 3339 in UTC; None for an unknown time."""
    if time_ms <= 0:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_ms(text: str, param: str) -> int:
    """Milliseconds since the epoch of an RFC 3339 time or of Unix seconds. Raises InvalidRequest."""
    try:
        if text.replace(".", "", 1).isdecimal():
            return int(float(text) * 1000)
        at = datetime.fromisoformat(text)
        if at.tzinfo is None:
            raise ValueError("no offset")  # it would be another time on each machine
        return int(at.timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{param} must be an RFC 3339 time or Unix seconds", param=param) from error
