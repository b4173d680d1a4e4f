"""When a request may start and when it expires: by what its caller said, and when its first record was appended. Pure.

Times are milliseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.limits import LIMITS
from penstock.schemas.records import InferenceRequest
from penstock.schemas.times import moment_ms
from penstock.schemas.topics import HEADER_NOT_BEFORE


def ttl_of_deadline(value: Any, now_ms: int, *, cut: bool) -> int:
    """Milliseconds from now to a time; one that has passed leaves 1 ms: it expires. `cut`: at most the horizon."""
    ttl_ms = _moment(value, "deadline", bounded=False) - now_ms
    if ttl_ms > LIMITS.max_ttl_ms and not cut:
        raise InvalidRequest(f"deadline lies more than {LIMITS.max_ttl_ms} ms ahead", param="deadline")
    return min(max(1, ttl_ms), LIMITS.max_ttl_ms)


def start_of(value: Any) -> int:
    """The time that `start_after` names. Raises InvalidRequest."""
    return _moment(value, "start_after")


def with_header(
    request: InferenceRequest, headers: Iterable[tuple[str, bytes | None]], appended_ms: int
) -> InferenceRequest:
    """The request with the start that a header of its record names, if it names none. Raises InvalidRequest."""
    for name, value in headers if request.start_after is None else ():
        if name == HEADER_NOT_BEFORE and value is not None:
            named = replace(request, start_after=_moment(value.decode(errors="replace"), HEADER_NOT_BEFORE))
            check_start(named, appended_ms)
            return named
    return request


def check_start(request: InferenceRequest, appended_ms: int, *, clocks_differ_ms: int = 0) -> None:
    """Raises InvalidRequest if the request may start only when the longest time to live is over.

    `clocks_differ_ms`: by so much it may, where another clock has judged it already.
    """
    if request.start_after is not None and request.start_after - appended_ms >= LIMITS.max_ttl_ms + clocks_differ_ms:
        raise InvalidRequest(f"start_after lies {LIMITS.max_ttl_ms} ms ahead or more", param="start_after")


def waits_from(request: InferenceRequest, appended_ms: int) -> int:
    """When it may start: as it is appended, or at `start_after` if that is later."""
    return max(appended_ms, request.start_after or 0)


def deadline_of(request: InferenceRequest, appended_ms: int) -> int:
    """When it expires. What its caller named counts from `appended_ms`, the default from when it may start."""
    if request.ttl_ms is not None:
        return appended_ms + request.ttl_ms
    return min(waits_from(request, appended_ms) + LIMITS.default_ttl_ms, appended_ms + LIMITS.max_ttl_ms)


def _moment(value: Any, name: str, *, bounded: bool = True) -> int:
    try:
        return moment_ms(value, bounded=bounded)
    except ValueError:
        raise InvalidRequest(f"{name} must be an RFC 3339 time or Unix seconds", param=name) from None
