"""The worker's leave of its group has a bound, whatever Faust's services do when they are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from penstock.processors import app
from penstock.processors.settings import WorkerSettings


async def leave(stop: Callable[[], Awaitable[None]]) -> None:
    parts: Any = SimpleNamespace(membership=SimpleNamespace(stop=stop))
    await app.WorkerApp(WorkerSettings())._leave(parts)


async def test_a_stop_that_ignores_cancellations_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "LEAVE_S", 0.1)
    let_go = asyncio.Event()

    async def deaf() -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    leaving = asyncio.create_task(leave(deaf))
    _, left = await asyncio.wait({leaving}, timeout=5)
    let_go.set()
    assert not left
    assert "worker.leave_failed" in caplog.text


async def test_what_it_raises_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    await leave(AsyncMock(side_effect=OSError("the broker is away")))
    assert "worker.leave_failed error=OSError('the broker is away')" in caplog.text
