"""The lines of a batch or a bulk that are in flight: how many and how large. Used on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.common.tasks import set_within

MOST_BYTES = 16 * 2**20
BUDGET_BYTES = 64 * 2**20
LOOK_S = 1.0


class Budget:
    """Bytes that windows have together."""

    def __init__(self, most: int = BUDGET_BYTES) -> None:
        self.most = most
        self.used = 0


class Window:
    """One feeder takes a slot, each end gives it back."""

    def __init__(self, most: Callable[[], int], budget: Budget | None = None, *, most_bytes: int = MOST_BYTES) -> None:
        """`most` lines at this moment."""
        self._most = most
        self._budget = budget or Budget()
        self._most_bytes = most_bytes
        self._freed = asyncio.Event()
        self.lines = 0
        self._bytes = 0

    async def take(self, size: int) -> None:
        """Wait for room, then count a line of so many bytes; a single one always has room."""
        while not self.take_nowait(size):
            self._freed.clear()
            await set_within(self._freed, LOOK_S)  # the share may have grown, or another window gave

    def take_nowait(self, size: int) -> bool:
        """As `take`; False if there is no room now."""
        if self.lines and not self._has_room(size):
            return False
        self.lines += 1
        self._bytes += size
        self._budget.used += size
        return True

    def _has_room(self, size: int) -> bool:
        own = self.lines < self._most() and self._bytes + size <= self._most_bytes
        return own and self._budget.used + size <= self._budget.most

    def give(self, size: int) -> None:
        self.lines -= 1
        self._bytes -= size
        self._budget.used -= size
        self._freed.set()

    def close(self) -> None:
        """Give back what is left: a line whose task was cancelled before it began gives nothing."""
        self._budget.used -= self._bytes
        self.lines = self._bytes = 0
