"""When a batch begins that is not full: a moment later, so that what is started meanwhile goes with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class BatchWindow:
    """Calls `begin` on the event loop: at once for a full batch, else `seconds` after the first look."""

    def __init__(self, seconds: float, begin: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._begin = begin
        self._timer: asyncio.TimerHandle | None = None

    def look(self, *, full: bool) -> None:
        """A batch could begin: a run has come to an idle model, or another batch has ended."""
        if full or not self._seconds:
            self._now()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._now)

    def _now(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._begin()
