"""Which turns of the conversations are eligible: of each class the first of a line, none while one of it is out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

from penstock.processors.core.queue.lane_queues import ItemT, LaneQueues, QueuedItem
from penstock.processors.core.queue.lines import Line


class Turns(Generic[ItemT]):
    """Admits items of lines to the queues of their lanes, and withdraws them, as their lines move on."""

    def __init__(self, queued_items: Mapping[int, QueuedItem[ItemT]], lanes: Mapping[str, LaneQueues[ItemT]]) -> None:
        self._queued_items = queued_items
        self._lanes = lanes
        self._lines: dict[str, Line[QueuedItem[ItemT]]] = {}

    def __len__(self) -> int:
        """Lines that have an item queued or started."""
        return len(self._lines)

    def add(self, name: str, queued: QueuedItem[ItemT]) -> None:
        """A turn is queued behind those that are there."""
        line = self._line(name)
        line.add(queued)
        self._update_front(line, queued.klass)

    def put_back(self, name: str, queued: QueuedItem[ItemT]) -> None:
        """A turn that was out must start again: it holds its line meanwhile."""
        line = self._line(name)
        line.held, line.returned = True, queued

    def left(self, name: str, queued: QueuedItem[ItemT]) -> None:
        """A turn is not queued any more."""
        line, klass = self._lines[name], queued.klass
        if queued.returned:
            line.returned = None
            return
        line.left(klass)
        if line.fronts.get(klass) is queued:
            del line.fronts[klass]
        self._update_front(line, klass)
        self._forget(name)

    def is_out(self, name: str, queued: QueuedItem[ItemT]) -> None:
        """A turn leaves the queue and holds its line until `release`: no other one is eligible."""
        line = self._lines[name]
        line.held = True
        for klass in list(line.fronts):
            if line.fronts[klass] is not queued:
                self._update_front(line, klass)

    def release(self, name: str) -> bool:
        """The turn that was out has ended: the next ones become eligible. Whether one was out."""
        line = self._lines.get(name)
        if line is None or not line.held:
            return False
        line.held = False
        if (queued := line.returned) is not None:  # it waits like the others from now on
            line.returned = None
            queued.returned = False
            self._lanes[queued.item.lane].withdraw(queued)
            line.add(queued)
        for klass in list(line.classes()):
            self._update_front(line, klass)
        self._forget(name)
        return True

    def _line(self, name: str) -> Line[QueuedItem[ItemT]]:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = Line(self._queued_items)
        return line

    def _update_front(self, line: Line[QueuedItem[ItemT]], klass: str) -> None:
        before, now = line.fronts.get(klass), line.front(klass)
        if before is now:
            return
        if now is not None:
            line.fronts[klass] = now
            self._lanes[now.item.lane].admit(now)
        else:
            del line.fronts[klass]
        if before is not None:
            self._lanes[before.item.lane].withdraw(before)

    def _forget(self, name: str) -> None:
        if not self._lines[name]:
            del self._lines[name]
