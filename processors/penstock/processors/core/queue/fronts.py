"""What is at the front of the lanes: which class and which requests are next. It reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import islice
from typing import Generic

from penstock.processors.core.queue.lane_queues import ItemT, LaneQueues
from penstock.schemas.topics import CLASSES, RANKS


class Fronts(Generic[ItemT]):
    """Of the scheduler's lanes, by name."""

    def __init__(self, lanes: Mapping[str, LaneQueues[ItemT]]) -> None:
        self._lanes = lanes
        self.paused: frozenset[str] = frozenset()
        """Classes of which nothing is offered."""

    def ahead(self, lane: str, klass: str, count: int) -> list[ItemT]:
        """The first eligible items of a class on a lane."""
        known = self._lanes.get(lane)
        return [] if known is None else [queued.item for queued in islice(known.queues[klass], count)]

    def first(self, lane: str) -> ItemT | None:
        """The first eligible item of a lane, by class."""
        known = self._lanes.get(lane)
        strict = None if known is None else known.strict(self.paused)
        return None if known is None or strict is None else next(iter(known.queues[strict])).item

    def waiting(self, lane: str) -> Iterator[ItemT]:
        """The eligible items of a lane by class, whether something keeps them from starting or not.

        Those of a paused class are left out.
        """
        known = self._lanes.get(lane)
        for klass in CLASSES:
            if known is not None and klass not in self.paused:
                yield from (queued.item for queued in known.queues[klass])

    def front(self, count: int) -> list[ItemT]:
        """The first eligible items of all lanes by class; lanes are merged by arrival, each keeps its order."""
        items: list[ItemT] = []
        for klass in CLASSES:
            queues = (iter(lane.queues[klass]) for lane in self._lanes.values())
            merged = merge(*queues, key=lambda queued: queued.item.arrived_at)
            items += (queued.item for queued in islice(merged, count - len(items)))
        return items

    def urgent_waits(self, lane: str, klass: str) -> bool:
        """Whether a class above this one has eligible items on a lane."""
        known = self._lanes.get(lane)
        strict = None if known is None else known.strict(self.paused)
        return strict is not None and RANKS[strict] < RANKS[klass]

    def next_tenant(self, lane: str, klass: str) -> str | None:
        """Whose item of a class starts next on a lane; None when no item of it is eligible."""
        first = self.ahead(lane, klass, 1)
        return first[0].tenant if first else None

    def lanes(self) -> list[str]:
        return [name for name, lane in self._lanes.items() if lane.strict(self.paused) is not None]

    def depth(self, lane: str, klass: str) -> int:
        """Queued items of a class on a lane, those behind their conversation included."""
        known = self._lanes.get(lane)
        return 0 if known is None else known.depths[klass]
