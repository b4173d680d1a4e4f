"""A sleep on the event loop that may be ended early."""

from __future__ import annotations

import asyncio


class Alarm:
    """One task sleeps; whoever runs on the same loop may wake it."""

    def __init__(self) -> None:
        self._woken: asyncio.Future[None] | None = None

    async def sleep(self, seconds: float) -> None:
        """Return after so long, or when `ring` was called."""
        loop = asyncio.get_running_loop()
        self._woken = loop.create_future()
        timer = loop.call_later(seconds, self.ring)
        try:
            await self._woken
        finally:
            timer.cancel()
            self._woken = None

    def ring(self) -> None:
        """Wake who sleeps; nothing happens while nobody does."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
