"""Threads by what they wait for: a slow list, a long conversation or a broker that is away blocks only its like.

Where tenants have the work done, one tenant takes only its share of the threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from penstock.schemas.errors import PenstockError

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class _Line:
    """The calls of one tenant: those that work, and those that wait for one of these."""

    turns: asyncio.Semaphore
    calls: int = field(default=0)


class Pool:
    """Some threads for one kind of work; they begin when they are needed."""

    def __init__(self, name: str, threads: int, of_one: int | None = None) -> None:
        """`of_one`: the most threads that work for one tenant."""
        self._executor = ThreadPoolExecutor(threads, f"gateway-{name}")
        self._of_one = of_one or threads
        self._lines: dict[str, _Line] = {}

    async def run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Do it on one of the threads; waits in line when all are busy."""
        return await asyncio.wrap_future(self._begin(work, *args, **options))

    async def run_for(self, tenant: str, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The same for a tenant; waits while the tenant's share of the threads is busy.

        A thread counts until its work has ended, also when the caller has gone meanwhile.
        """
        line = self._lines.setdefault(tenant, _Line(asyncio.Semaphore(self._of_one)))
        line.calls += 1
        try:
            await line.turns.acquire()
        except BaseException:
            self._left(tenant, line)
            raise
        loop = asyncio.get_running_loop()

        def ended() -> None:
            line.turns.release()
            self._left(tenant, line)

        try:
            future = self._begin(work, *args, **options)
        except BaseException:
            ended()
            raise
        future.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(ended))
        return await asyncio.wrap_future(future)

    def _begin(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
        def do() -> T:
            try:
                return work(*args, **options)
            except PenstockError as error:
                # A kept exception must not keep the frames that it came through: they hold Kafka clients.
                error.__cause__ = error.__context__ = None
                raise error.with_traceback(None)  # noqa: B904

        return self._executor.submit(do)

    def _left(self, tenant: str, line: _Line) -> None:
        line.calls -= 1
        if not line.calls:
            del self._lines[tenant]

    def close(self) -> None:
        """Take no more work. What runs ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Threads:
    """The pools of one gateway. `one_tenant`: there are no others to keep threads for."""

    def __init__(self, *, one_tenant: bool = False) -> None:
        self.lists = Pool("lists", 2, None if one_tenant else 1)
        """Pages of requests, from the view's file."""
        self.conversations = Pool("conversations", 8, None if one_tenant else 2)
        """Topics of conversations: reading, making and deleting them."""
        self.deliveries = Pool("deliveries", 8, None if one_tenant else 2)
        """Webhooks and records of single requests, read from their topics."""
        self.dead_letters = Pool("dead-letters", 4, None if one_tenant else 2)
        """Dead letters: their index, their topic, and waiting until the index has all of it."""
        self.artifacts = Pool("artifacts", 24, None if one_tenant else 6)
        """Calls of the artifact store."""
        self.ends = Pool("ends", 2)
        """Ends of partitions, for callers that need the view to have read all."""
        self.pieces = Pool("pieces", 2)
        """Streams that are read again for clients that come to one that nobody followed."""
        self.brokers = Pool("brokers", 1)
        """Whether brokers answer: nothing else may be waited for there."""
        self.metadata = Pool("metadata", 2)
        """Which topics and partitions there are."""

    def close(self) -> None:
        for pool in (value for value in vars(self).values() if isinstance(value, Pool)):
            pool.close()
