"""The lines of a batch that are in flight: how many and how large. Used on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

MOST_BYTES = 16 * 2**20
LOOK_S = 1.0


class Window:
    """One feeder takes, whoever ends gives."""

    def __init__(self, most: Callable[[], int], most_bytes: int = MOST_BYTES) -> None:
        """`most` lines at this moment."""
        self._most = most
        self._most_bytes = most_bytes
        self._freed = asyncio.Event()
        self.lines = 0
        self._bytes = 0

    async def take(self, size: int) -> None:
        """Wait for room, then count a line of so many bytes; a single one always has room."""
        while self.lines and (self.lines >= self._most() or self._bytes + size > self._most_bytes):
            self._freed.clear()
            try:
                await asyncio.wait_for(self._freed.wait(), LOOK_S)  # the share may have grown
            except TimeoutError:
                continue
        self.lines += 1
        self._bytes += size

    def give(self, size: int) -> None:
        self.lines -= 1
        self._bytes -= size
        self._freed.set()
