"""Texts in pieces that can be written: half of a surrogate pair is a character to Python, but no UTF-8 holds it."""

from __future__ import annotations

import codecs


class EncodableStream:
    """`texts.encodable` for a text that comes in pieces: a first half waits for the piece with the second."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-16-le")("replace")

    def feed(self, text: str) -> str:
        return self._decoder.decode(text.encode("utf-16-le", "surrogatepass"))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
