"""How many items are queued, by class, and which of them have waited longest or are past their deadline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

from penstock.processors.core.queue.lane_queues import ByTime, ItemT, QueuedItem
from penstock.schemas.topics import CLASSES


class Census(Generic[ItemT]):
    """Of all lanes together, those behind their line included. The scheduler counts in and out."""

    def __init__(self, queued_items: Mapping[int, QueuedItem[ItemT]]) -> None:
        """`queued_items`: all that are queued, by ticket."""
        self._queued_items = queued_items
        self._depths = dict.fromkeys(CLASSES, 0)
        self._by_arrival: dict[str, ByTime[ItemT]] = {klass: ByTime(queued_items) for klass in CLASSES}
        self._by_deadline: ByTime[ItemT] = ByTime(queued_items)
        self._with_deadline = 0

    def count(self, queued: QueuedItem[ItemT]) -> None:
        klass, item = queued.klass, queued.item
        self._depths[klass] += 1
        self._by_arrival[klass].add(item.arrived_at, queued, self._depths[klass])
        if item.deadline is not None:
            self._with_deadline += 1
            self._by_deadline.add(item.deadline, queued, self._with_deadline)

    def left(self, queued: QueuedItem[ItemT]) -> None:
        self._depths[queued.klass] -= 1
        if queued.item.deadline is not None:
            self._with_deadline -= 1

    def depths(self) -> dict[str, int]:
        """Queued items by class."""
        return dict(self._depths)

    def up_to(self, klass: str) -> int:
        """How many items are queued in a class and those above it: where a newcomer of the class stands."""
        depths = self._depths
        if klass == "high":
            return depths["high"]
        return depths["high"] + depths["medium"] if klass == "medium" else len(self._queued_items)

    def oldest_age(self, now: float) -> dict[str, float]:
        """Seconds that the longest waiting item of each class has waited; 0 for an empty one."""
        first = {klass: times.first() for klass, times in self._by_arrival.items()}
        return {klass: 0.0 if arrived_at is None else now - arrived_at for klass, arrived_at in first.items()}

    def expired(self, now: float, at_most: int = 1 << 30) -> list[ItemT]:
        """The first queued items whose deadline has passed; they stay queued."""
        return [queued.item for queued in self._by_deadline.up_to(now, at_most)]

    def kept(self) -> int:
        """Entries of all times, those of items that have left too: how much is kept for what is not queued."""
        return sum(map(len, (*self._by_arrival.values(), self._by_deadline)))
