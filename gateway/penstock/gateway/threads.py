"""Threads by what they wait for: a slow list, a long conversation or a broker that is away blocks only its like."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from penstock.schemas.errors import PenstockError

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """A few threads for one kind of work; they begin when they are needed."""

    def __init__(self, name: str, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, f"gateway-{name}")

    async def run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do it on one of the threads; waits in line when all are busy."""

        def do() -> T:
            try:
                return work(*args, **options)
            except PenstockError as error:
                # Whoever keeps it must not keep the frames that it came through: they hold Kafka clients.
                error.__cause__ = error.__context__ = None
                raise error.with_traceback(None)  # noqa: B904

        return await asyncio.get_running_loop().run_in_executor(self._executor, do)

    def close(self) -> None:
        """Take no more work. What runs ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Threads:
    """The pools of one gateway."""

    def __init__(self) -> None:
        self.lists = Pool("lists", 2)
        """Pages of requests, from the view's file."""
        self.conversations = Pool("conversations", 4)
        """Topics of conversations: reading, making and deleting them."""
        self.ends = Pool("ends", 2)
        """Ends of partitions, for whoever must know that the view has seen all."""
        self.metadata = Pool("metadata", 2)
        """Which topics and partitions there are."""

    def close(self) -> None:
        for pool in (self.lists, self.conversations, self.ends, self.metadata):
            pool.close()
