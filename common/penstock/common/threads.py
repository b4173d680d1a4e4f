"""Blocking calls in threads that nobody has to wait for.

asyncio's executor joins its threads when the loop ends and when the interpreter ends: one that reads a file from a dead
disk, or waits for a process that imports torch, would hold up the worker's end. These threads are daemons.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

LINGER_S = 5.0
"""How long a thread waits for the next call of its kind: to start one costs more than most calls."""


class DaemonThreads:
    """How many calls of one kind at once, each in a daemon thread; more wait in line.

    A call that hangs keeps its place until it ends, also when its caller has gone: what hangs holds up its own kind.
    """

    def __init__(self, most: int = 8) -> None:
        self._room = asyncio.Semaphore(most)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        """Threads that wait for a call, less the calls that wait for one of them."""

    async def run(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The function's result, as `in_daemon_thread`."""
        await self._room.acquire()
        loop = asyncio.get_running_loop()

        def work() -> T:
            try:
                return function(*arguments, **named)
            finally:
                _call(loop, lambda _: self._room.release(), None)

        return await _in_thread(self._begin, work)

    def _begin(self, call: Callable[[], None]) -> None:
        with self._lock:
            is_taken = self._idle > 0
            if is_taken:
                self._idle -= 1
        if is_taken:
            self._calls.put(call)
        else:
            threading.Thread(target=self._serve, args=(call,), name="blocking calls", daemon=True).start()

    def _serve(self, call: Callable[[], None]) -> None:
        while True:
            call()
            del call  # an idle thread holds nothing of its last call
            with self._lock:
                self._idle += 1
            try:
                call = self._calls.get(timeout=LINGER_S)
            except queue.Empty:
                with self._lock:
                    if self._idle:
                        self._idle -= 1
                        return
                call = self._calls.get()  # it counts on this thread, and comes in a moment


async def in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """The function's result, from a thread that ends with it.

    When the caller is cancelled the thread goes on alone, and what it returns is dropped.
    """
    name = getattr(function, "__qualname__", "blocking call")

    def begin(work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=name, daemon=True).start()

    return await _in_thread(begin, lambda: function(*arguments))


async def _in_thread(begin: Callable[[Callable[[], None]], None], function: Callable[[], T]) -> T:
    """The function's result; `begin` has a thread do what it is given."""
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
            result = function()
        except BaseException as error:
            _call(loop, set_exception, error)
        else:
            _call(loop, set_result, result)

    begin(work)
    return await future


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, value)
    except RuntimeError:  # the loop has ended meanwhile, and nobody waits any more
        pass
