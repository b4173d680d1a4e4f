"""Bulk submits without a broker: each line gets an answer, whatever becomes of the other lines and of the body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from gateway_parts import service_with
from kit.gateway_http import client, gateway_app
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.routes import bulk
from penstock.gateway.service.submitting import Checked
from penstock.schemas.ids import idempotent_request_id


class Submitting:
    """Accepts every request, except those whose prompt is `fail`."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self.facts = self
        self.flying = self.most = 0

    def catching_up(self) -> None:
        return None

    async def check(self, caller: Any, request: Any) -> Any:
        return Checked(caller, request, None)

    async def submit(self, checked: Checked, *, idempotency_key: str | None, **_: Any) -> Any:
        request = checked.request
        if request.payload["prompt"] == "fail":
            raise RuntimeError("unforeseen")
        self.flying += 1
        self.most = max(self.most, self.flying)
        await asyncio.sleep(0.01)
        self.flying -= 1
        request_id = request.request_id
        if idempotency_key is not None:
            request_id = idempotent_request_id("default", idempotency_key)
        self.submitted.append(request)
        return SimpleNamespace(request_id=request_id)


def line(**fields: Any) -> bytes:
    return json.dumps({"task": "text_generation", "payload": {"prompt": "p"}, **fields}).encode() + b"\n"


async def answers(
    content: bytes | AsyncIterator[bytes], submitting: Submitting | None = None, limits: BodyLimits | None = None
) -> list[str]:
    """For each line "taken", or the code of its error."""
    app = gateway_app(bulk.router, service=service_with(submitting or Submitting()), bodies=limits)
    async with client(app) as http:
        response = await http.post("/v1/requests/bulk", content=content, headers={"content-type": bulk.MEDIA_TYPE})
    assert response.status_code == 200, response.text
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [one["index"] for one in found] == list(range(len(found)))
    return [one["error"]["code"] if "error" in one else "taken" for one in found]


async def many_lines(stops_after: int | None = None) -> AsyncIterator[bytes]:
    for number in range(20):
        if number == stops_after:
            await asyncio.Event().wait()
        yield line()


@pytest.mark.parametrize(
    ("content", "limits", "most_lines", "taken", "code"),
    [
        (lambda: many_lines(stops_after=3), BodyLimits(timeout_s=0.1), 100, 3, "invalid"),
        (many_lines, BodyLimits(max_lines_bytes=10 * len(line())), 100, 10, "too_large"),
        (lambda: line() * 9, None, 5, 5, "too_large"),
    ],
    ids=["the body stops", "the body is too large", "too many lines"],
)
async def test_a_body_that_breaks_off_is_answered_with_what_was_taken(
    monkeypatch: pytest.MonkeyPatch, content: Any, limits: BodyLimits | None, most_lines: int, taken: int, code: str
) -> None:
    monkeypatch.setattr(bulk, "MAX_LINES", most_lines)
    assert await answers(content(), limits=limits) == ["taken"] * taken + [code]


async def test_a_line_with_an_unforeseen_failure_fails_alone() -> None:
    submitting = Submitting()
    odd = [line(idempotency_key="\ud800"), line(payload={"prompt": "x", "seed": float("inf")})]
    lines = [line(), *odd, line(payload={"prompt": "fail"}), line()]
    assert await answers(b"".join(lines), submitting) == ["taken", "invalid", "invalid", "internal", "taken"]
    assert len(submitting.submitted) == 2


@pytest.mark.parametrize("at_once", [9, 3])
async def test_lines_in_flight_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    submitting = Submitting()
    monkeypatch.setattr(bulk, "AT_ONCE_BYTES", at_once * len(line()))
    assert await answers(line() * 9, submitting) == ["taken"] * 9
    assert submitting.most == at_once
