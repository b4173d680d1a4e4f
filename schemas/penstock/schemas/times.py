"""Times as callers read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from penstock.schemas.errors import InvalidRequest

EPOCH = datetime.fromtimestamp(0, UTC)
LAST_MS = 253_402_300_799_999
"""The end of the year 9999, the last that RFC 3339 has."""


def rfc3339(time_ms: int) -> str | None:
    """Milliseconds since the epoch as RFC 3339 in UTC; None for an unknown time, and for one beyond the calendar."""
    if not 0 < time_ms <= LAST_MS:
        return None
    return (EPOCH + timedelta(milliseconds=time_ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_ms(text: str, param: str) -> int:
    """Milliseconds since the epoch of an RFC 3339 time or of Unix seconds. Raises InvalidRequest."""
    try:
        if text.replace(".", "", 1).isdecimal():
            ms = int(float(text) * 1000)
        else:
            at = datetime.fromisoformat(text)
            if at.tzinfo is None:
                raise ValueError("no offset")  # it would be another time on each machine
            ms = round((at - EPOCH) / timedelta(milliseconds=1))
        if ms > LAST_MS:
            raise ValueError("beyond the calendar")
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{param} must be an RFC 3339 time or Unix seconds", param=param) from error
    return ms
