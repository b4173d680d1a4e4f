"""Bodies that arrive, as plain ones or gzip, and which part of a content an exchange gets."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import tracemalloc
from collections.abc import AsyncIterator
from functools import cache
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from kit.gateway_http import call, gateway_app
from penstock.gateway.app import ROUTERS
from penstock.gateway.document.described_routes import TABLE
from penstock.gateway.edge import bodies
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.conditions import Span, Unsatisfiable, not_modified, span_of
from penstock.gateway.edge.encodings import PIECE_BYTES, Unzipped
from penstock.gateway.edge.errors import EdgeRefusal
from penstock.gateway.edge.rules import Rules, Takes
from penstock.schemas.errors import TooLarge

# -- how long a body may take


KIB = 1024


@pytest.mark.parametrize(
    ("path", "rate"), [("/v1/artifacts", 16 * KIB), ("/v1/artifacts/", 16 * KIB), ("/v1/chat/completions", 256 * KIB)]
)
async def test_what_has_come_lengthens_the_time_for_the_rest(
    path: str, rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = AsyncMock(return_value={"type": "http.request", "body": b"x" * 64 * KIB, "more_body": True})
    monkeypatch.setattr(bodies.asyncio, "timeout_at", timeout_at := Mock(wraps=asyncio.timeout_at))
    limits = BodyLimits(max_bytes=10_000_000, max_file_bytes=10_000_000)
    body = limits.body(TABLE.rules("POST", path), {"headers": []}, receive)
    for _ in range(4):
        await body()
    deadlines = [one.args[0] for one in timeout_at.call_args_list]
    lengthened = [later - earlier for earlier, later in itertools.pairwise(deadlines)]
    assert lengthened == pytest.approx([64 * KIB / rate] * 3)


async def read_lines(*, timeout_s: float, line_s: float, work_s: float, count: int) -> None:
    """Lines that come one in `line_s`, each of which takes `work_s` here."""
    rest = [True] * (count - 1) + [False]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(line_s)
        return {"type": "http.request", "body": b"x", "more_body": rest.pop(0)}

    body = BodyLimits(timeout_s=timeout_s).body(TABLE.rules("POST", "/v1/requests/bulk"), {"headers": []}, receive)
    while not body.whole:
        await body()
        await asyncio.sleep(work_s)


async def test_the_time_for_lines_is_that_of_the_client_alone() -> None:
    await read_lines(timeout_s=0.05, line_s=0, work_s=0.1, count=3)
    with pytest.raises(EdgeRefusal):
        await read_lines(timeout_s=0.1, line_s=0.04, work_s=0.01, count=1_000)


# -- bodies as gzip


PLAIN = b'{"model": 5}'
ZIPPED = gzip.compress(PLAIN, mtime=0)
EMPTY = gzip.compress(b"")
TOO_LARGE = BodyLimits().refusal(Rules(takes=Takes.LARGE_JSON), {"type": "http"}).message


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=3), st.data())
def test_a_body_in_any_pieces_is_what_was_compressed(texts: list[bytes], data: st.DataObject) -> None:
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

    got = await call(app(), "POST", "/v1/chat/completions", content=pieces(), headers=headers)
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


# -- conditional and partial GET


TAG = '"abc"'


NO_RANGES = [None, "bytes=5-2", "bytes=-", "bytes=1-2,4-5", "items=1-2", "bytes=a-b", f"bytes=0-{'9' * 5_000}"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=0-0", Span(0, 1)),
        ("bytes=2-5", Span(2, 6)),
        ("Bytes = 2-5", Span(2, 6)),
        *((value, Span(7, 10)) for value in ("bytes=7-", "bytes=7-99", "bytes=-3")),
        ("bytes=-99", Span(0, 10)),
        *((value, None) for value in NO_RANGES),
    ],
)
def test_one_range_is_a_part_and_all_else_is_the_whole(value: str | None, expected: Span | None) -> None:
    assert span_of(value, None, TAG, 10) == expected


@pytest.mark.parametrize(("value", "size"), [("bytes=10-", 10), ("bytes=11-12", 10), ("bytes=-0", 10), ("bytes=0-", 0)])
def test_a_range_behind_the_end_cannot_be_satisfied(value: str, size: int) -> None:
    with pytest.raises(Unsatisfiable, match=str(size)):
        span_of(value, None, TAG, size)


def test_conditions_know_the_tag_of_the_content() -> None:
    for if_range in (TAG, '"other"', f"W/{TAG}", "Sun, 22 Nov 2026 02:00:00 GMT"):
        assert (span_of("bytes=0-1", if_range, TAG, 10) is not None) == (if_range == TAG), if_range
    for same in (TAG, f"W/{TAG}", "*", f'"x", {TAG}'):
        assert not_modified(same, TAG), same
    for other in (None, '"x"', "abc"):
        assert not not_modified(other, TAG), other


@given(st.text(alphabet="bytes=0123456789-, ", max_size=30), st.integers(0, 1_000))
def test_no_header_leads_out_of_the_content(value: str, size: int) -> None:
    try:
        found = span_of(value, None, TAG, size)
    except Unsatisfiable:
        return
    assert found is None or 0 <= found.start < found.end <= size
