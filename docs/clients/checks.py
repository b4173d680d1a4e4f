"""What the checks of all clients share: the models by where they run, a tool, a form, an image, and the register."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

Check = Callable[[str], Any]
"""Takes `local` or `remote`, gives something true when it worked."""
CHECKS: dict[str, dict[str, Check]] = {}

HERE_ONLY = "here only"
"""What a check gives for what no server does that is asked remotely: images."""

HELLO: Any = [{"role": "user", "content": "Hello"}]
ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
LONG = 400
"""Tokens: an answer that is cut is `incomplete` on /v1/responses, and some clients raise then."""
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}
FORCED: Any = {"type": "function", "function": {"name": "weather"}}


class City(BaseModel):
    """A form that any model fills within few tokens."""

    city: str = Field(max_length=12)
    people: int = Field(ge=0, le=99_999)


LENIENT = "LENIENT_URL"
"""The variable with the address of a gateway that ignores unknown fields."""
IGNORED = "penstock-ignored-fields"
WHIM = {"use_beam_search": True, "whim": 1}
"""Fields that are refused by default."""


def text(where: str) -> str:
    return where


def embedding(where: str) -> str:
    return {"local": "local-embeddings", "remote": "remote-embeddings"}[where]


def of(client: str, feature: str) -> Callable[[Check], Check]:
    """A check is good if it gives something true."""

    def keep(check: Check) -> Check:
        CHECKS.setdefault(client, {})[feature] = check
        return check

    return keep


def png(side: int = 32) -> bytes:
    """A small picture, made without a library."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes((7 * x + 3 * y) % 256 for x in range(side) for _ in range(3)) for y in range(side))
    head = struct.pack("!IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def image_url() -> str:
    return "data:image/png;base64," + base64.b64encode(png()).decode()
