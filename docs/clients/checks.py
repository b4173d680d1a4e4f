"""What the checks of all clients share: the models by where they run, a tool, a form, an image, and the register."""

from __future__ import annotations

import base64
import os
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

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


Name = Annotated[str, Field(max_length=12)]


class City(BaseModel):
    """A form that any model fills within few tokens."""

    model_config = ConfigDict(extra="forbid")
    city: Name
    people: int = Field(ge=0, le=99_999)


LENIENT = "LENIENT_URL"
"""The variable with the address of a gateway that ignores unknown fields."""
IGNORED = "penstock-ignored-fields"
WHIM = {"use_beam_search": True, "whim": 1}
"""Fields that are refused by default."""
UNKNOWN = "unknown fields, both modes"
AGENT = "tools, three turns"
BATCHES = "embeddings, default batches"
TEXTS = [f"{number} {'x' * 1_000}"[:1_000] for number in range(1_000)]
"""A megabyte of texts. A tokenizer takes the long word as one unknown token, so that they cost little to embed."""


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


def both_modes(ask: Callable[[str], Any]) -> Any:
    """`ask` sends WHIM to the address that it gets. One gateway refuses it by name, the other answers."""
    try:
        ask(os.environ["OPENAI_BASE_URL"])
    except Exception as error:
        return "use_beam_search" in str(error) and ask(os.environ[LENIENT])
    return False


def here(check: Callable[[], Any]) -> Check:
    """A check of what only the local models do."""
    return lambda where: HERE_ONLY if where == "remote" else check()


@cache
def png(side: int = 32, *, noise: bool = False) -> bytes:
    """A picture, made without a library. Noise cannot be compressed: 1,300 pixels a side are 5 MB."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    def row(y: int) -> bytes:
        return dice.randbytes(3 * side) if noise else bytes((7 * (x // 3) + 3 * y) % 256 for x in range(3 * side))

    dice = random.Random(0)
    rows = b"".join(b"\0" + row(y) for y in range(side))
    head = struct.pack("!IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


PICTURES = {"chat with images": png(), "image of 5 MB": png(1_300, noise=True)}


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()
