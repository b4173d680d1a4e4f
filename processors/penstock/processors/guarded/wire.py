"""The messages between this side and a guarded process: the length of a JSON object, the object, then its bytes.

Not pickle: what has opened hostile input is not believed any more than the input.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO, cast

LENGTH = struct.Struct("!I")
MAX_HEADER_BYTES = 1 << 20
"""Operations of a request are part of a header."""


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


def answered(stream: BinaryIO) -> dict[str, Any]:
    """The next object of who has to answer. Raises EOFError where there is none, ValueError."""
    found = read_header(stream)
    if found is None:
        raise EOFError("the process has ended")
    return found


def read_body(stream: BinaryIO, size: Any, most: int) -> bytes:
    """Read `size` bytes. Raises ValueError for a size that cannot be, EOFError where fewer came."""
    if type(size) is not int or not 0 <= size <= most:
        raise ValueError("the process sent an impossible size")
    found = stream.read(size)
    if len(found) < size:
        raise EOFError("the process has ended")
    return found


def write(stream: BinaryIO, header: dict[str, Any], *bodies: bytes | memoryview) -> None:
    text = json.dumps(header).encode()
    stream.write(LENGTH.pack(len(text)) + text)
    for body in bodies:
        stream.write(body)
    stream.flush()
