"""Work that needs the schema registry, on the event loop: while the registry is away it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.schemas.errors import RegistryUnavailable

T = TypeVar("T")

AGAIN_S = 1.0


async def when_there(work: Callable[[], Awaitable[T]], waits_for: Callable[[str | None], None]) -> T:
    """Do it. `waits_for` gets the reason why it waits, and None when it continues."""
    waited = False
    while True:
        try:
            found = await work()
        except RegistryUnavailable as error:
            waits_for(str(error))
            waited = True
            await asyncio.sleep(AGAIN_S)
        else:
            if waited:
                waits_for(None)
            return found
