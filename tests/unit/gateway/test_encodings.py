"""Bodies as gzip: read as plain ones in any pieces, held to the limits of plain ones, and refused for what they are."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from kit.gateway_http import client, gateway_app
from penstock.gateway.app import ROUTERS
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.encodings import PIECE_BYTES, Unzipped
from penstock.gateway.edge.rules import Rules, Takes
from penstock.schemas.errors import TooLarge

PLAIN = b'{"model": 5}'
ZIPPED = gzip.compress(PLAIN, mtime=0)
EMPTY = gzip.compress(b"")
TOO_LARGE = BodyLimits().refusal(Rules(takes=Takes.LARGE_JSON), {"type": "http"}).message


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=3), st.data())
def test_a_body_in_any_pieces_is_what_was_compressed(texts: list[bytes], data: st.DataObject) -> None:
    """One gzip behind another is one text."""
    whole = b"".join(map(gzip.compress, texts))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    messages: list[dict[str, Any]] = [{"type": "http.request", "body": one, "more_body": True} for one in pieces]
    messages[-1]["more_body"] = False

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def read() -> bytes:
        body, found, more = Unzipped(receive, len(whole), TooLarge("too large")), b"", True
        while more:
            message = await body()
            found, more = found + message["body"], message["more_body"]
            assert len(message["body"]) <= PIECE_BYTES
        assert (await body())["type"] == "http.disconnect"
        return found

    assert asyncio.run(read()) == b"".join(texts)


@cache
def app() -> FastAPI:
    return gateway_app(*ROUTERS, hot=True)


async def answer(content: bytes, encoding: str) -> tuple[int, str, str | None]:
    headers = {"content-type": "application/json", "content-encoding": encoding}

    async def pieces() -> AsyncIterator[bytes]:
        """Without a declared length."""
        for at in range(0, len(content), 65536):
            yield content[at : at + 65536]

    async with client(app()) as http:
        got = await http.post("/v1/chat/completions", content=pieces(), headers=headers)
    error = json.loads(got.content)["error"]
    return got.status_code, error["code"], error["param"] or error["message"]


@pytest.mark.parametrize(
    ("content", "encoding", "expected"),
    [
        (ZIPPED, "gzip", (400, "invalid", "model")),
        (ZIPPED, "X-GZIP, identity", (400, "invalid", "model")),
        (PLAIN, "identity", (400, "invalid", "model")),
        (PLAIN, "UTF-8", (400, "invalid", "model")),
        (ZIPPED[:-9], "gzip", (400, "invalid", "the body is no whole gzip: it is cut off")),
        (PLAIN, "gzip", (400, "invalid", "the body is not gzip, as its content-encoding says")),
        (EMPTY * 15 + ZIPPED + EMPTY * 15, "gzip", (400, "invalid", "model")),
        (EMPTY * 17, "gzip", (400, "invalid", "the body has too many gzip members")),
        (gzip.compress(b" ") * 10_001, "gzip", (400, "invalid", "the body has too many gzip members")),
        (b"\x1f\x8b\x08\x08\0\0\0\0\0\xff" + b"name" * 10_000_000, "gzip", (413, "too_large", TOO_LARGE)),
        (ZIPPED, "br", (415, "unsupported_media_type", "content-encoding")),
        (ZIPPED, "gzip, gzip", (415, "unsupported_media_type", "content-encoding")),
    ],
    ids=range(12),
)
async def test_how_a_body_is_encoded(content: bytes, encoding: str, expected: Any) -> None:
    assert await answer(content, encoding) == expected


async def test_a_bomb_is_refused_by_the_limit_of_what_it_would_be() -> None:
    bomb = gzip.compress(b" " * 300_000_000, 9)
    assert len(bomb) < 300_000
    tracemalloc.start()
    try:
        status, code, _ = await answer(bomb, "gzip")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (status, code) == (413, "too_large")
    assert peak < 100_000_000
