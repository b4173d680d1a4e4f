"""Waits that can be cancelled at any moment, and the end of tasks that nobody needs any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event; False if it is not set within `timeout_s`.

    `asyncio.wait_for` must not be used in a loop that is cancelled: before Python 3.12 it returns, as if nothing had
    been cancelled, when what it waits for ends at the same moment. Whoever waits for the loop's end waits for ever.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these, and wait until each has ended, however it does."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
