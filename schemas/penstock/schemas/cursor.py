"""Cursors: an opaque place in a request's stream, valid at every gateway."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from dataclasses import dataclass

from penstock.schemas.errors import InvalidCursor

_VERSION = 1
_BODY = struct.Struct(">BiqqiQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A place on `inference.result`, and how much text of which (epoch, attempt) its holder has (characters)."""

    partition: int
    offset: int
    epoch: int
    attempt: int
    text_length: int


def encode_cursor(cursor: Cursor) -> str:
    body = _BODY.pack(_VERSION, cursor.partition, cursor.offset, cursor.epoch, cursor.attempt, cursor.text_length)
    return base64.urlsafe_b64encode(body + struct.pack(">I", zlib.crc32(body))).rstrip(b"=").decode()


def decode_cursor(text: str) -> Cursor:
    """Raises InvalidCursor for anything that `encode_cursor` did not make."""
    try:
        data = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError) as error:
        raise InvalidCursor("the cursor is malformed", param="cursor") from error
    body, check = data[:-4], data[-4:]
    if len(body) != _BODY.size or struct.pack(">I", zlib.crc32(body)) != check or body[0] != _VERSION:
        raise InvalidCursor("the cursor is malformed", param="cursor")
    _, partition, offset, epoch, attempt, length = _BODY.unpack(body)
    return Cursor(partition=partition, offset=offset, epoch=epoch, attempt=attempt, text_length=length)
