"""Blocking calls in threads that nobody has to wait for.

asyncio's executor joins its threads when the loop ends and when the interpreter ends: one that reads a file from a dead
disk, or waits for a process that imports torch, would hold up the worker's end. These threads are daemons.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """So many calls of one kind at once, each in a daemon thread; more wait in line.

    A call that hangs keeps its place until it ends, also when its caller has gone: what hangs holds up its own kind.
    """

    def __init__(self, most: int = 8) -> None:
        self._room = asyncio.Semaphore(most)

    async def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The function's result, as `in_daemon_thread`."""
        await self._room.acquire()
        loop = asyncio.get_running_loop()

        def work() -> T:
            try:
                return function(*arguments, **named)
            finally:
                _call(loop, lambda _: self._room.release(), None)

        return await in_daemon_thread(work)


async def in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """The function's result. When the caller is cancelled the thread goes on alone, and what it returns is dropped."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def set_result(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def set_exception(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def work() -> None:
        try:
            result = function(*arguments)
        except BaseException as error:
            _call(loop, set_exception, error)
        else:
            _call(loop, set_result, result)

    name = getattr(function, "__qualname__", "blocking call")
    threading.Thread(target=work, name=name, daemon=True).start()
    return await future


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, value)
    except RuntimeError:  # the loop has ended meanwhile, and nobody waits any more
        pass
