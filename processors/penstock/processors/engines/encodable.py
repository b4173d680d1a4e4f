"""Texts that come in pieces and can be written: see `encodable`."""

from __future__ import annotations

import codecs


class EncodableStream:
    """As `encodable`: a first half of a surrogate pair waits for the piece with the second."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-16-le")("replace")

    def feed(self, text: str) -> str:
        return self._decoder.decode(text.encode("utf-16-le", "surrogatepass"))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
