"""Asking for the end of a request: what is told follows from when it was asked, not from how quick the worker is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.gateway.service.control import Control
from penstock.schemas.codec import default_codec
from penstock.schemas.records import Origin
from penstock.schemas.topics import TopicNames

ORIGIN = Origin(topic="inference.request.high", partition=0, offset=1, append_time_ms=1)


class QuickWorker:
    """Ends the request before the broker's acknowledgement is back."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry
        self.commands = 0

    async def produce(self, *args: Any, **options: Any) -> Any:
        self.commands += 1
        self.entry.done = True
        return SimpleNamespace(offset=0)


@pytest.mark.parametrize("ended", [False, True])
async def test_whether_an_end_was_asked_for_is_decided_when_it_is_asked(ended: bool) -> None:
    """202 became 200 where a worker was quick, though this call had asked for the end."""
    entry = SimpleNamespace(request_id="r", tenant="t", done=ended, origin=ORIGIN, conversation_id=None)
    worker = QuickWorker(entry)

    class Found:
        async def find(self, tenant: str, request_id: str) -> Any:
            return entry

    unused: Any = None
    parts: Any = (worker, unused, unused, Found())
    control = Control(*parts, default_codec(), TopicNames(), unused)
    assert await control.cancel("t", "r") == (entry, not ended)
    assert worker.commands == (0 if ended else 1)
