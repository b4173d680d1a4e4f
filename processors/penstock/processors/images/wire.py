"""What a worker and a decoder say to each other: a JSON object with its length before it, then bytes as it announces.

Not pickle: what has opened a hostile image is not believed any more than the image.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO, cast

LENGTH = struct.Struct("!I")
MAX_HEADER_BYTES = 4096


def read_header(stream: BinaryIO) -> dict[str, Any] | None:
    """The next object; None at the end of the stream. Raises ValueError for what is none."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MAX_HEADER_BYTES:
        raise ValueError("the header is too long")
    found: Any = json.loads(stream.read(length))
    if not isinstance(found, dict):
        raise ValueError("the header is no object")
    return cast("dict[str, Any]", found)


def write(stream: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    stream.write(LENGTH.pack(len(text)) + text)
    stream.write(body)
    stream.flush()
