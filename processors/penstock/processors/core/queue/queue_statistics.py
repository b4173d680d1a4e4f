"""How many items are queued, by class, and which of them have waited longest or are past their deadline."""

from __future__ import annotations

from itertools import islice, takewhile
from typing import Generic

from penstock.processors.core.queue.fairqueue import Sorted
from penstock.processors.core.queue.lane_queues import ItemT, QueuedItem
from penstock.schemas.topics import CLASSES


class QueueStatistics(Generic[ItemT]):
    """Of all lanes together, those behind their conversation included. The scheduler counts in and out."""

    def __init__(self) -> None:
        self._depths = dict.fromkeys(CLASSES, 0)
        self._by_arrival = {klass: Sorted() for klass in CLASSES}
        self._by_deadline = Sorted()

    def count(self, queued: QueuedItem[ItemT]) -> None:
        item = queued.item
        self._depths[queued.klass] += 1
        self._by_arrival[queued.klass].add((item.arrived_at, queued.ticket))
        if item.deadline is not None:
            self._by_deadline.add((item.deadline, queued.ticket, item))

    def left(self, queued: QueuedItem[ItemT]) -> None:
        item = queued.item
        self._depths[queued.klass] -= 1
        self._by_arrival[queued.klass].remove((item.arrived_at, queued.ticket))
        if item.deadline is not None:
            self._by_deadline.remove((item.deadline, queued.ticket, item))

    def depths(self) -> dict[str, int]:
        """Queued items by class."""
        return dict(self._depths)

    def up_to(self, klass: str) -> int:
        """How many items are queued in a class and those above it: the place of a new item of the class."""
        depths = self._depths
        if klass == "high":
            return depths["high"]
        return depths["high"] + depths["medium"] + (0 if klass == "medium" else depths["low"])

    def oldest_age(self, now: float) -> dict[str, float]:
        """Seconds that the longest waiting item of each class has waited; 0 for an empty one."""
        first = {klass: times.first() for klass, times in self._by_arrival.items()}
        return {klass: 0.0 if entry is None else now - entry[0] for klass, entry in first.items()}

    def expired(self, now: float, at_most: int | None = None) -> list[ItemT]:
        """The first queued items whose deadline has passed; they stay queued."""
        due = takewhile(lambda entry: entry[0] <= now, self._by_deadline)
        return [item for *_, item in islice(due, at_most)]
