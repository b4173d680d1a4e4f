"""What several rooms of the worker's tests share."""

from __future__ import annotations

import asyncio

import pytest

from penstock.common.background import on_faults


@pytest.fixture
async def faults() -> list[str]:
    """One entry for each fault that is heard on the event loop."""
    heard: list[str] = []
    on_faults(asyncio.get_running_loop(), lambda: heard.append("fault"))
    return heard
