"""Bulk submits without a broker: each line is answered, whatever becomes of the others and of the body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway_parts import edge_of, service_with
from penstock.gateway.context import GatewayContext, put_context
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.edge import install_edge
from penstock.gateway.routes import bulk
from penstock.gateway.service.submitting import Checked
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.ids import idempotent_request_id

PAYLOAD = {"task": "text_generation", "payload": {"prompt": "p"}}


class Submitting:
    """Takes every request, but for those whose prompt is `fail`."""

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


async def sent(content: bytes | AsyncIterator[bytes], submitting: Submitting, limits: BodyLimits) -> httpx.Response:
    context = GatewayContext(settings=GatewaySettings(), policy=AuthPolicy.build())
    context.connected = service_with(submitting)
    app = FastAPI()
    put_context(app, context)
    app.include_router(bulk.router)
    install_edge(app, edge_of(context, bodies=limits))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await http.post("/v1/requests/bulk", content=content, headers={"content-type": bulk.MEDIA_TYPE})


async def answers(
    content: bytes | AsyncIterator[bytes],
    *,
    submitting: Submitting | None = None,
    limits: BodyLimits | None = None,
) -> list[Any]:
    """For each line its id, or the code of its error."""
    response = await sent(content, submitting or Submitting(), limits or BodyLimits())
    assert response.status_code == 200, response.text
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [one["index"] for one in found] == list(range(len(found)))
    return [one["error"]["code"] if "error" in one else "taken" for one in found]


def line(**fields: Any) -> bytes:
    return json.dumps({**PAYLOAD, **fields}).encode() + b"\n"


async def test_a_body_that_stops_coming_is_answered_with_what_was_taken() -> None:
    async def content() -> AsyncIterator[bytes]:
        yield line() * 3
        await asyncio.sleep(5)
        yield line()

    found = await answers(content(), limits=BodyLimits(timeout_s=0.1))
    assert found == ["taken"] * 3 + ["invalid"]


async def test_a_body_that_grows_too_large_is_answered_with_what_was_taken() -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield line()

    found = await answers(content(), limits=BodyLimits(max_lines_bytes=10 * len(line())))
    assert found == ["taken"] * 10 + ["too_large"]


async def test_lines_too_many_are_told_behind_those_that_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_LINES", 5)
    assert await answers(line() * 9) == ["taken"] * 5 + ["too_large"]


async def test_a_line_that_fails_unforeseen_fails_alone() -> None:
    submitting = Submitting()
    lines = [line(), line(idempotency_key="\ud800"), line(payload={"prompt": "fail"}), line()]
    assert await answers(b"".join(lines), submitting=submitting) == ["taken", "invalid", "internal", "taken"]
    assert len(submitting.submitted) == 2


async def test_what_is_on_its_way_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    submitting = Submitting()
    assert await answers(line() * 9, submitting=submitting) == ["taken"] * 9
    assert submitting.most == 9
    submitting.most = 0
    monkeypatch.setattr(bulk, "AT_ONCE_BYTES", 3 * len(line()))
    assert await answers(line() * 9, submitting=submitting) == ["taken"] * 9
    assert submitting.most == 3
