"""How long a body may take, by what has come and by where it goes."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from penstock.gateway.edge import bodies
from penstock.gateway.edge.bodies import Body, bytes_per_s

KIB = 1024


@pytest.mark.parametrize(
    ("path", "rate"),
    [("/v1/artifacts", 16 * KIB), ("/v1/artifacts/", 16 * KIB), ("/v1/chat/completions", 256 * KIB), ("/", 256 * KIB)],
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
    body = Body(receive, 10_000_000, 30.0, bytes_per_s({"path": path, "headers": []}))
    for _ in range(4):
        await body()
    lengthened = [later - earlier for earlier, later in itertools.pairwise(deadlines)]
    assert lengthened == pytest.approx([64 * KIB / rate] * 3)
