"""Batches of one model: gathered on the event loop, computed by one thread, made smaller when memory runs out.

An engine says what waits (`Waiting`: which requests are alike, what a batch holds) and how a batch is computed. When
memory runs out, the batch is computed in halves, batches are smaller from there on and grow again with care
(`BatchLimit`), which the worker gets to know. After any other fault each request is computed by itself, so that only
the one that brings it about fails.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.engines.backend import Emit
from penstock.processors.engines.batching.limit import BatchLimit
from penstock.processors.engines.process.out_of_memory import free_caches, is_out_of_memory
from penstock.schemas.errors import EngineFailed
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Waiting(Protocol[ItemT]):
    """What waits to be computed. `most` is in what a `BatchLimit` counts: tokens, rows."""

    def __len__(self) -> int: ...

    def fills(self, most: int) -> bool:
        """Whether the next batch is full: what comes could not join it."""
        ...

    def take(self, most: int) -> list[ItemT]:
        """The next batch: at most so much, or one item; empty when none waits."""
        ...


class Computing(Protocol[ItemT, ResultT]):
    """How a batch is computed. `compute` and `split` are called in the computing thread, `ended` on the event loop."""

    def compute(self, batch: Sequence[ItemT]) -> Sequence[ResultT]:
        """A result for each item. Raises whatever the model raises. It may be called again with some of them."""
        ...

    def weight(self, batch: Sequence[ItemT]) -> int:
        """What the batch counts against the limit."""
        ...

    def wanted(self, item: ItemT) -> bool:
        """Whether anybody still waits for it."""
        ...

    def split(self, item: ItemT) -> Sequence[ItemT]:
        """The parts of an item that is too large by itself; none when it has none."""
        ...

    def ended(self, item: ItemT, result: ResultT | EngineFailed) -> None: ...


class Batches(Generic[ItemT, ResultT]):
    """All methods but `moved` are called on the event loop."""

    def __init__(
        self,
        waiting: Waiting[ItemT],
        computing: Computing[ItemT, ResultT],
        limit: BatchLimit,
        emit: Emit,
        *,
        window_s: float = 0.0,
    ) -> None:
        """`window_s`: so long a batch that is not full waits for more."""
        self.limit = limit
        self._waiting = waiting
        self._computing = computing
        self._emit = emit
        self._window_s = window_s
        self._timer: asyncio.TimerHandle | None = None
        """The end of the time in which a first batch waits for more."""
        self._queue: queue.SimpleQueue[list[ItemT]] = queue.SimpleQueue()
        self._under_way = 0
        """Batches that are computed, or wait for that."""
        self._moves = 0
        self._ran_out = False
        """Memory ran out, and the worker does not know yet."""
        self._told = limit.size
        """The size of batches as the worker knows it."""
        self._loop = asyncio.get_running_loop()

    def start(self) -> None:
        """Begin to compute; for the thread that loads. What it computes there comes before this."""
        threading.Thread(target=self._compute_forever, name="compute", daemon=True).start()

    def look(self) -> None:
        """Something waits that did not, or may join another batch."""
        if not self._waiting:
            return
        full = self._waiting.fills(self.limit.size)
        if not self._under_way:
            if full or not self._window_s:
                self._begin()
            elif self._timer is None:
                self._timer = self._loop.call_later(self._window_s, self._begin)
        elif self._under_way == 1 and full:
            self._put()  # so that the computing thread has not to wait for it; others still gather

    def check(self) -> None:
        """Tell the worker that memory ran out, once for all batches since the last call, and the size of batches."""
        if self._ran_out:
            self._ran_out = False
            self._emit(("out_of_memory", None))
        if (size := self.limit.size) != self._told:
            self._told = size
            self._emit(("batches", size))

    def progress(self, *, busy: bool = False) -> int | None:
        """As `Backend.progress`. `busy`: there is work beside the computing thread, which reports its own steps too."""
        return self._moves if self._under_way or busy else None

    def moved(self) -> None:
        """A step was taken; from any thread."""
        self._moves += 1

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._under_way and self._waiting:
            self._put()
            self.look()

    def _put(self) -> None:
        self._under_way += 1
        self._queue.put(self._waiting.take(self.limit.size))

    # -- in the thread that computes

    def _compute_forever(self) -> None:
        while True:
            batch = self._queue.get()
            pairs = self.within_memory(batch)
            if pairs and not any(isinstance(result, EngineFailed) for _, result in pairs):
                self.limit.went_well()
            self._moves += 1
            self._loop.call_soon_threadsafe(self._end, pairs)

    def within_memory(self, batch: Sequence[ItemT]) -> list[tuple[ItemT, ResultT | EngineFailed]]:
        """Each item that is still wanted, or its parts, with the result or the error that it fails with."""
        batch = [item for item in batch if self._computing.wanted(item)]
        if not batch:
            return []
        if len(batch) > 1 and self._computing.weight(batch) > self.limit.size:
            return self._each(_halves(batch))  # memory ran out under the other half
        try:
            return list(zip(batch, self._computing.compute(batch), strict=True))
        except Exception as error:
            ran_out = is_out_of_memory(error)
            said = shortened(f"{type(error).__name__}: {error}", 300)
            logger.error("engine.batch_failed items=%d error=%s", len(batch), said, exc_info=None if ran_out else error)
        # The error is gone by now, and with it the tensors of the batch.
        free_caches()
        self._moves += 1
        if ran_out:
            self._ran_out = True
            self.limit.halve(self._computing.weight(batch))
            items = batch if len(batch) > 1 else self._computing.split(batch[0])
            parts = _halves(items)
        else:
            parts = [[item] for item in batch]
        if len(parts) > 1:
            return self._each(parts)
        if ran_out:
            return [(batch[0], OutOfMemory("memory ran out for this request alone"))]
        return [(batch[0], EngineFailed(f"the model failed: {said}"))]

    def _each(self, parts: Sequence[Sequence[ItemT]]) -> list[tuple[ItemT, ResultT | EngineFailed]]:
        return [pair for part in parts for pair in self.within_memory(part)]

    def _end(self, pairs: Sequence[tuple[ItemT, ResultT | EngineFailed]]) -> None:
        self._under_way -= 1
        self.look()  # before the results: the computing thread waits
        for item, result in pairs:
            self._computing.ended(item, result)


def _halves(items: Sequence[ItemT]) -> Sequence[Sequence[ItemT]]:
    """None of what cannot be parted."""
    middle = len(items) // 2
    return [items[:middle], items[middle:]] if middle else []
