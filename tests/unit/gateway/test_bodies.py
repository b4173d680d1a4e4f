"""How long a body may take, by what has come and by where it goes."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from penstock.gateway.document.described_routes import TABLE
from penstock.gateway.edge import bodies
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.errors import EdgeRefusal

KIB = 1024


@pytest.mark.parametrize(
    ("path", "rate"),
    [("/v1/artifacts", 16 * KIB), ("/v1/artifacts/", 16 * KIB), ("/v1/chat/completions", 256 * KIB)],
)
async def test_what_has_come_lengthens_the_time_for_the_rest(
    path: str, rate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[float] = []
    timeout_at = asyncio.timeout_at

    def noted(when: float) -> Any:
        deadlines.append(when)
        return timeout_at(when)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 64 * KIB, "more_body": True}

    monkeypatch.setattr(bodies.asyncio, "timeout_at", noted)
    limits = BodyLimits(max_bytes=10_000_000, max_file_bytes=10_000_000)
    body = limits.body(TABLE.rules("POST", path), {"headers": []}, receive)
    for _ in range(4):
        await body()
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
