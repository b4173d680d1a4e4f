"""Lines of a text that comes in pieces, each with its number and place, in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """`number` counts from 1, blank lines too; `start` is its first byte. `content` is None for a line too long."""

    number: int
    start: int
    content: bytes | None


class LineReader:
    """Takes pieces, gives whole lines without their ends; blank ones are left out."""

    def __init__(self, max_bytes: int, *, number: int = 1, start: int = 0) -> None:
        """`max_bytes` of one line; more are not kept. `number` and `start` are those of the first line."""
        self._max_bytes = max_bytes
        self._number = number
        self._start = start
        self._kept = bytearray()
        self._length = 0

    def feed(self, piece: bytes) -> Iterator[Line]:
        """The lines that end in this piece. To be iterated to the end."""
        at = 0
        while (end := piece.find(b"\n", at)) >= 0:
            self._add(piece[at:end])
            at = end + 1
            yield from self._ended(1)
        self._add(piece[at:])

    def close(self) -> Iterator[Line]:
        """The last line, if no line's end came behind it."""
        yield from self._ended(0)

    def _add(self, part: bytes) -> None:
        self._length += len(part)
        if self._length <= self._max_bytes:
            self._kept += part
        else:
            self._kept.clear()

    def _ended(self, line_end: int) -> Iterator[Line]:
        too_long = self._length > self._max_bytes
        content = bytes(self._kept)
        if too_long or content.strip():
            yield Line(self._number, self._start, None if too_long else content)
        self._number += 1
        self._start += self._length + line_end
        self._length = 0
        self._kept.clear()
