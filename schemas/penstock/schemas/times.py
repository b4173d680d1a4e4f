"""Times as callers read them."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from typing import Any

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


def moment_ms(value: Any, *, bounded: bool = True) -> int:
    """Milliseconds since the epoch of an RFC 3339 time (UTC if it names no offset), or of a number: s, ms, µs or ns.

    A number may be text. Its size determines its unit: as seconds it would lie beyond the year 5138. Raises ValueError:
    what it must be. Without `bounded` a number that is no time is the nearest one.
    """
    problem = ValueError("an RFC 3339 time, or seconds or milliseconds since the epoch")
    try:
        if isinstance(value, str) and (_DATE.fullmatch(value) or not _NUMBER.fullmatch(value)):
            at = datetime.fromisoformat(value.upper())
            milliseconds = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000
        elif isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise problem
        else:
            milliseconds = float(value) * 1000
            for _ in ("ms", "µs", "ns"):
                milliseconds /= 1000 if milliseconds >= _END_MS else 1
            if not bounded:
                milliseconds = min(max(milliseconds, 0), _END_MS)
        if bounded and not 0 < milliseconds < _END_MS:
            raise problem
        return int(milliseconds)
    except (ValueError, TypeError, OverflowError):
        raise problem from None


_NUMBER = re.compile(r"-?\d+(\.\d*)?", re.ASCII)
_DATE = re.compile(r"(19|20)\d{6}", re.ASCII)
"""ISO 8601 without hyphens: as seconds it would be a time in 1970."""
_END_MS = 1e14
