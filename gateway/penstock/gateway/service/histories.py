"""Answers of `GET /v1/admin/history`: made on a thread, once for all who ask for the same."""

from __future__ import annotations

import asyncio
import time

from penstock.common.clock import now_ms
from penstock.gateway.threads import Threads
from penstock.gateway.view.outputs import json_at_once
from penstock.gateway.view.view import View

KEPT_S = 2.0
"""An answer is given again for so long."""


class Histories:
    """Used on the event loop."""

    def __init__(self, view: View, threads: Threads) -> None:
        self._view, self._threads = view, threads
        self._made: dict[tuple[int, int], tuple[float, asyncio.Future[bytes]]] = {}

    async def of(self, range_minutes: int, step: int) -> bytes:
        """The history of so many minutes by steps of so many, as JSON."""
        now_s = time.monotonic()
        self._made = {asked: made for asked, made in self._made.items() if now_s - made[0] < KEPT_S}
        if (made := self._made.get((range_minutes, step))) is None:
            read = self._view.history(now_ms(), range_minutes, step)
            answer = asyncio.ensure_future(self._threads.lists.run(lambda: json_at_once(read())))
            made = self._made[range_minutes, step] = now_s, answer
        return await asyncio.shield(made[1])
