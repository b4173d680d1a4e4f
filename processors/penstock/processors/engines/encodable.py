"""Texts that can be written: half of a surrogate pair is a character to Python and JSON, but no UTF-8 holds it."""

from __future__ import annotations

import codecs


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
        self._decoder = codecs.getincrementaldecoder("utf-16-le")("replace")

    def feed(self, text: str) -> str:
        return self._decoder.decode(text.encode("utf-16-le", "surrogatepass"))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
