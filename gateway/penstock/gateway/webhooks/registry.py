"""Work that needs the schema registry, on the event loop: while the registry is away it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.gateway.group_work import GroupWork
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, RegistryUnavailable
from penstock.schemas.records import Record

T = TypeVar("T")
R = TypeVar("R", bound=Record)

AGAIN_S = 1.0


async def when_there(work: Callable[[], Awaitable[T]], of: GroupWork) -> T:
    """Do it; the work of the group waits meanwhile."""
    waited = False
    while True:
        try:
            found = await work()
        except RegistryUnavailable as error:
            of.reason = str(error)
            waited = True
            await asyncio.sleep(AGAIN_S)
        else:
            if waited:
                of.reason = None
            return found


async def decoded(codec: Codec, value: bytes, kind: type[R], of: GroupWork) -> R | None:
    """The record, by a codec that does not block; None for what is none of ours: other readers pass over it too."""

    async def decode() -> R:
        return codec.decode(value, kind)

    try:
        return await when_there(decode, of)
    except DecodeError:
        return None
