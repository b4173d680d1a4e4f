"""Conditional and partial GET (RFC 9110): what the headers of a request ask of content with an entity tag."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.IGNORECASE)
_TAG = re.compile(r'(W/)?("[^"]*")')


class Unsatisfiable(ValueError):
    """The range lies behind the end of the content."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes from `start` up to `end`, which is not in it."""

    start: int
    end: int

    def content_range(self, size: int) -> str:
        return f"bytes {self.start}-{self.end - 1}/{size}"


def not_modified(if_none_match: str | None, etag: str) -> bool:
    """Whether the client has this content already. `etag` is strong, with its quotes."""
    if if_none_match is None:
        return False
    return if_none_match.strip() == "*" or any(tag == etag for _, tag in _TAG.findall(if_none_match))


def span_of(value: str | None, if_range: str | None, etag: str, size: int) -> Span | None:
    """The part that `Range` asks for; None for the whole: no range, several, a malformed one, or another content.

    Raises Unsatisfiable.
    """
    # A date would be good too, but nothing here says when content changed: then the whole is always right.
    if value is None or (if_range is not None and if_range.strip() != etag):
        return None
    asked = _RANGE.fullmatch(value.replace(" ", ""))
    if asked is None or not (asked[1] or asked[2]) or max(len(asked[1]), len(asked[2])) > 18:
        return None
    if not asked[1]:  # the last so many bytes
        start, end = max(0, size - int(asked[2])), size
    else:
        start, end = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
        if asked[2] and int(asked[2]) < start:
            return None
    if start >= end:
        raise Unsatisfiable(f"the content has {size} bytes")
    return Span(start, end)
