"""Conversations as lines: one item of a line is out at a time, and within a class they go in the order of their log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class Turn(Protocol):
    """A queued item of a line."""

    @property
    def turn(self) -> tuple[int, int]:
        """Its place in the log, and its ticket in the queue."""
        ...

    @property
    def klass(self) -> str: ...


TurnT = TypeVar("TurnT", bound=Turn)


class Line(Generic[TurnT]):
    """The waiting turns of one conversation. `held`: one of them was started and has not ended."""

    __slots__ = ("_counts", "_heaps", "_queued", "fronts", "held", "returned")

    def __init__(self, queued: Mapping[int, TurnT]) -> None:
        self._queued = queued  # all that is queued, by ticket
        self._heaps: dict[str, list[tuple[int, int]]] = {}  # by class; what has left stays until it stands first
        self._counts: dict[str, int] = {}
        self.fronts: dict[str, TurnT] = {}  # by class, the turn that is eligible
        self.held = False
        self.returned: TurnT | None = None  # the turn that holds the line and waits to be started again

    def __bool__(self) -> bool:
        """Whether there is anything to remember."""
        return self.held or any(self._counts.values())

    def add(self, turn: TurnT) -> None:
        """A turn is queued."""
        heappush(self._heaps.setdefault(turn.klass, []), turn.turn)
        self._counts[turn.klass] = self._counts.get(turn.klass, 0) + 1

    def left(self, klass: str) -> None:
        """A turn that was added is not queued any more."""
        self._counts[klass] -= 1
        heap = self._heaps[klass]
        if len(heap) > 2 * self._counts[klass] + 16:
            heap[:] = [entry for entry in heap if entry[1] in self._queued]
            heapify(heap)

    def front(self, klass: str) -> TurnT | None:
        """The turn of a class that should be eligible now."""
        if self.held:
            return None
        heap = self._heaps.get(klass)
        while heap and heap[0][1] not in self._queued:
            heappop(heap)
        return self._queued[heap[0][1]] if heap else None

    def classes(self) -> Iterable[str]:
        return self._heaps
