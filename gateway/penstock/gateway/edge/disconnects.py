"""Noticing that a client has gone while something is done for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer."""


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, or ClientGone (and the work cancelled) if the client disconnects first."""
    waiter = asyncio.current_task()
    assert waiter is not None
    left = False

    async def watch() -> None:
        nonlocal left
        with suppress(Exception):  # a connection that cannot be asked is gone too
            await until_disconnect(receive)
        left = True
        waiter.cancel()

    gone = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not left or waiter.uncancel():  # somebody else cancels too: that goes first
            raise
        raise ClientGone from None
    finally:
        gone.cancel()
