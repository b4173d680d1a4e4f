"""Server-sent events, as a client reads them: bytes to lines.

Lines end with a line feed, a carriage return or both. Python and httpx would also part a text at U+2028, U+0085 and
others, which JSON may hold as they are.
"""

from __future__ import annotations

import re

DONE = b"[DONE]"
"""The data that ends a stream of OpenAI's."""

_LINE_END = re.compile(rb"\r\n|\n|\r")


class SseLines:
    """Splits what comes, in pieces of any size, into lines without their ends."""

    def __init__(self) -> None:
        self._begun: list[bytes] = []
        self._after_return = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that end in this piece."""
        if self._after_return and piece:
            piece = piece.removeprefix(b"\n")
            self._after_return = False
        *lines, rest = _LINE_END.split(piece)
        if lines:
            lines[0] = b"".join([*self._begun, lines[0]])
            self._begun = []
            self._after_return = piece.endswith(b"\r")
        self._begun.append(rest)
        return lines

    def rest(self) -> bytes:
        """What came behind the last line's end."""
        return b"".join(self._begun)


def field_value(line: bytes, name: bytes) -> bytes | None:
    """The value of a line's field, without blanks around; None for other fields and for comments."""
    return line[len(name) + 1 :].strip() if line.startswith(name + b":") else None
