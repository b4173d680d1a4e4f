"""One piece of work that many callers share, where each needs one that began after its call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class SharedCalls:
    """On the event loop. One call is under way, and one more waits behind it for all who came meanwhile."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Raises what the work raises. It goes on when a caller is cancelled."""
        if self._running is None or self._running.done():
            task = self._running = asyncio.create_task(self._do())
        else:
            if self._next is None or self._next.done():
                self._next = asyncio.create_task(self._do(behind=self._running))
            task = self._next
        await asyncio.shield(task)

    async def _do(self, behind: asyncio.Task[None] | None = None) -> None:
        if behind is not None:
            await asyncio.wait([behind])
            self._running, self._next = self._next, None
        await self._work()
