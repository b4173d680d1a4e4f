"""The end of tasks that nobody needs any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these, and wait until each has ended, however it does."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
