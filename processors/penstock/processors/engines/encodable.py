"""Texts that can be written: half of a surrogate pair is a character to Python and JSON, but no UTF-8 holds it."""

from __future__ import annotations

REPLACEMENT = "\ufffd"


def encodable(text: str) -> str:
    """The text with halves of pairs joined where both are there, and replaced where one is alone."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class EncodableStream:
    """The same for a text that comes in pieces: a first half waits for the piece with the second."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> str:
        if self._held or not text.isascii():
            text = self._held + text
            self._held = ""
            if text and "\ud800" <= text[-1] <= "\udbff":
                text, self._held = text[:-1], text[-1]
            return encodable(text)
        return text

    def flush(self) -> str:
        held, self._held = self._held, ""
        return REPLACEMENT if held else ""
