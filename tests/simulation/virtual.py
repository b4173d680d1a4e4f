"""An event loop whose time is virtual: it never waits, and threads are calls that take a moment.

The asynchronous shells of the product run on it unchanged. One seed gives one history.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

MOST_TURNS = 2_000_000


class NothingHappens(Exception):
    """Everything waits, and nothing is set to a time."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`asyncio.to_thread` runs its function in the loop, up to `thread_s` later."""

    def __init__(self, rng: Random, thread_s: float = 0.01) -> None:
        super().__init__()
        self._rng, self._thread_s = rng, thread_s
        self._virtual_s = 0.0
        self._turns = 0
        self._selector = self
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._virtual_s

    def select(self, timeout: float | None) -> list[Any]:
        """Time passes up to what is due next."""
        self._turns += 1
        if timeout is None or self._turns > MOST_TURNS:
            raise NothingHappens(f"after {self._turns} turns, at {self._virtual_s:.3f} s")
        self._virtual_s += timeout
        return []

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()

        def call() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._rng.uniform(0.0, self._thread_s), call)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no files."""

    def _write_to_self(self) -> None:
        """The loop is never asleep."""


def run_virtually(rng: Random, make: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> VirtualLoop:
    """Run it to its end, and end what it left. What a task raises is raised here: nobody waits for some of them."""
    loop = VirtualLoop(rng)
    failures: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: failures.append(context.get("exception") or AssertionError(context)))
    main = loop.create_task(make(loop))
    try:
        loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with contextlib.suppress(NothingHappens):
            loop.run_until_complete(asyncio.sleep(60))
        loop.close()
    if failures:
        raise failures[0]
    return loop
