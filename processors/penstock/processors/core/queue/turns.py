"""Conversations as lines: one turn of a line is out at a time, and within a class they go in the order of their log.

Of each class the first turn of a line is eligible, none while one of it is out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Generic

from penstock.processors.core.queue.lane_queues import ItemT, LaneQueues, QueuedItem


class _Line(Generic[ItemT]):
    """The waiting turns of one conversation. `held`: one of them was started and has not ended."""

    __slots__ = ("fronts", "held", "returned", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, list[tuple[int, int, QueuedItem[ItemT]]]] = {}  # by class, in the order of the log
        self.fronts: dict[str, QueuedItem[ItemT]] = {}  # by class, the turn that is eligible
        self.held = False
        self.returned: QueuedItem[ItemT] | None = None  # the turn that holds the line and waits to be started again

    def __bool__(self) -> bool:
        """Whether there is anything to remember."""
        return self.held or any(self.waiting.values())

    def add(self, queued: QueuedItem[ItemT]) -> None:
        insort(self.waiting.setdefault(queued.klass, []), (queued.seq, queued.ticket, queued))

    def left(self, queued: QueuedItem[ItemT]) -> None:
        turns = self.waiting[queued.klass]
        del turns[bisect_left(turns, (queued.seq, queued.ticket))]

    def front(self, klass: str) -> QueuedItem[ItemT] | None:
        """The turn of a class that should be eligible now."""
        turns = None if self.held else self.waiting.get(klass)
        return turns[0][-1] if turns else None


class TurnAdmission(Generic[ItemT]):
    """Admits items of lines to the queues of their lanes, and withdraws them, as their lines move on."""

    def __init__(self, lanes: Mapping[str, LaneQueues[ItemT]]) -> None:
        self._lanes = lanes
        self._lines: dict[str, _Line[ItemT]] = {}

    def __len__(self) -> int:
        """Lines that have an item queued or started."""
        return len(self._lines)

    def __contains__(self, name: str) -> bool:
        """Whether a line has an item queued or started."""
        return name in self._lines

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
        line.left(queued)
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
        for klass in list(line.waiting):
            self._update_front(line, klass)
        self._forget(name)
        return True

    def _line(self, name: str) -> _Line[ItemT]:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line()
        return line

    def _update_front(self, line: _Line[ItemT], klass: str) -> None:
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
