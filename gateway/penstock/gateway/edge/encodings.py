"""Bodies that come compressed: decoded as they come, in pieces that the limits of plain bodies count."""

from __future__ import annotations

import zlib

from starlette.types import Message, Receive, Scope

from penstock.gateway.edge.errors import EdgeRefusal
from penstock.schemas.errors import InvalidRequest, TooLarge, UnsupportedMediaType

PIECE_BYTES = 256 * 1024
"""The most that is decoded at once: few bytes can become very many."""
MOST_MEMBERS = 10_000
"""Each costs a decoder. Tools for large files write one for each 64 KiB."""
MOST_EMPTY_MEMBERS = 16
"""In a row: they give nothing that a limit of decoded bytes would count."""
_GZIP = 16 + zlib.MAX_WBITS
_NAMES = frozenset({"gzip", "x-gzip"})
_PLAIN = frozenset({"", "identity", "utf-8", "utf8"})


def encoding_of(scope: Scope) -> str | None:
    """How the body is encoded; None if it is plain. Raises UnsupportedMediaType for all but gzip.

    Some clients name the charset here, which encodes nothing.
    """
    names = [
        name.strip().lower()
        for key, value in scope["headers"]
        if key == b"content-encoding"
        for name in value.decode("latin-1").split(",")
    ]
    applied = [name for name in names if name not in _PLAIN]
    if not applied:
        return None
    if len(applied) > 1 or applied[0] not in _NAMES:
        raise UnsupportedMediaType(
            f"content-encoding {', '.join(applied)[:100]} is not supported: send the body plain, or gzip",
            param="content-encoding",
        )
    return "gzip"


class Unzipped:
    """The `receive` of an exchange whose body comes as gzip. Raises EdgeRefusal for what is none.

    `limit`: encoded bytes that may come; `refusal`: of a body that brings more. Who reads counts the decoded ones.
    """

    def __init__(self, receive: Receive, limit: int, refusal: TooLarge) -> None:
        self._receive = receive
        self._left_bytes = limit
        self._refusal = refusal
        self._members = self._empty_members = 1
        """With the one that is being read; the empty ones since a byte came."""
        self._decoder = zlib.decompressobj(_GZIP)
        self._encoded = b""
        self._all_came = self._over = False

    async def __call__(self) -> Message:
        while True:
            if self._over:
                return await self._receive()
            if not self._encoded and not self._all_came:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                self._encoded = message.get("body", b"")
                self._left_bytes -= len(self._encoded)
                if self._left_bytes < 0:
                    raise EdgeRefusal(self._refusal)
                self._all_came = not message.get("more_body", False)
            piece = self._next()
            if self._all_came and not self._encoded:
                self._over = True
                if not self._decoder.eof:
                    raise EdgeRefusal(InvalidRequest("the body is no whole gzip: it is cut off"))
            if piece or self._over:
                return {"type": "http.request", "body": piece, "more_body": not self._over}

    def _next(self) -> bytes:
        if self._decoder.eof and self._encoded:  # one file behind another is one text
            self._members += 1
            self._empty_members += 1
            if self._members > MOST_MEMBERS or self._empty_members > MOST_EMPTY_MEMBERS:
                raise EdgeRefusal(InvalidRequest("the body has too many gzip members"))
            self._decoder = zlib.decompressobj(_GZIP)
        try:
            piece = self._decoder.decompress(self._encoded, PIECE_BYTES)
        except zlib.error:
            raise EdgeRefusal(InvalidRequest("the body is not gzip, as its content-encoding says")) from None
        if piece:
            self._empty_members = 0
        self._encoded = self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail
        return piece
