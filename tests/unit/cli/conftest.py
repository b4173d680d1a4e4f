"""A scripted gateway for commands. The commands poll it without long pauses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kit.cli import ScriptedGateway, scripted_gateway
from penstock.cli.commands import following, order_waits


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedGateway]:
    monkeypatch.setattr(following, "AGAIN_S", 0.02)
    monkeypatch.setattr(order_waits, "POLL_S", 0.01)
    monkeypatch.setattr(order_waits, "FAILED_S", 0.1)
    with scripted_gateway() as server:
        yield server
