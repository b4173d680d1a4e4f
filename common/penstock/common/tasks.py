"""Waits that can be cancelled at any moment, and the end of tasks that nobody needs any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

LOOK_S = 1.0


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for the event; False if it is not set within `timeout_s`.

    `asyncio.wait_for` must not be used in a loop that is cancelled: before Python 3.12 it returns, as if nothing had
    been cancelled, when what it waits for ends at the same moment. A caller that waits for the loop's end waits for
    ever.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


@asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncGenerator[None]:
    """As `asyncio.timeout`, without the time in which this process was stopped (SIGSTOP, a paused machine).

    Use it where the end of the time ends a process: what it waits for could not answer a stopped process, and may have
    been stopped too.
    """
    loop = asyncio.get_running_loop()
    step_s, left_s, looked_at = min(LOOK_S, seconds / 8), seconds, loop.time()

    def look() -> None:
        nonlocal left_s, looked_at, timer
        now = loop.time()
        left_s -= min(now - looked_at, 2 * step_s)
        looked_at = now
        if left_s > 0:
            timer = loop.call_later(min(step_s, left_s), look)
        else:
            timeout.reschedule(now)

    timer = loop.call_later(step_s, look)
    try:
        async with asyncio.timeout(None) as timeout:
            yield
    finally:
        timer.cancel()


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these, and wait until each has ended, however it does."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
