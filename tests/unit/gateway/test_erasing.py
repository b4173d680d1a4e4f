"""Erasing a request over HTTP takes its dead letters along, however it ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway_parts import service_with
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes import native


@pytest.mark.parametrize(("done", "steps"), [(True, ["forget r", "erase r"]), (False, ["erase r"])])
async def test_letters_go_first(monkeypatch: pytest.MonkeyPatch, done: bool, steps: list[str]) -> None:
    """A completed request whose webhook had failed kept that letter. One that runs is refused, and keeps all."""
    found: list[str] = []

    class Service:
        async def find(self, tenant: str, request_id: str) -> Any:
            return SimpleNamespace(done=done, status_name="completed")

        async def forget(self, caller: Caller, request_id: str) -> None:
            found.append(f"forget {request_id}")

        async def erase(self, tenant: str, request_id: str) -> None:
            found.append(f"erase {request_id}")

    service = service_with(Service())
    monkeypatch.setattr(native, "service_of", lambda _: service)
    monkeypatch.setattr(native, "caller_of", lambda _: Caller(tenant="t"))
    request: Any = None
    await native.erase(request, "r")
    assert found == steps
