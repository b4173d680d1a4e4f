"""Texts that wait to be embedded, in batches of like length: what pads a short text to a long one is computed in vain.

All that wait, sorted by length, fall into batches from the shortest on, each as large as is allowed. The next to be
computed is that which holds the text whose turn it is, so that none waits for ever. A batch that is taken away leaves
the others as they were: together they pad hardly more than if all texts had been sorted at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

Entry = tuple[int, int, T]
"""(length, number of arrival, the text)"""


class LengthBatches(Generic[T]):
    """Texts by name, each once."""

    def __init__(self) -> None:
        self._sorted: list[Entry[T]] = []
        self._by_number: dict[int, Entry[T]] = {}
        self._turns: list[tuple[float, int]] = []
        """A heap of (turn, number of arrival), also of texts that are gone."""
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, text: T, length: int, turn: float) -> None:
        """`length` in tokens. The smallest turn is first."""
        self._arrived += 1
        entry = (length, self._arrived, text)
        insort(self._sorted, entry, key=_place)
        self._by_number[self._arrived] = entry
        heappush(self._turns, (turn, self._arrived))

    def drop(self, unwanted: Callable[[T], bool]) -> None:
        self._sorted = [entry for entry in self._sorted if not unwanted(entry[2])]
        self._by_number = {entry[1]: entry for entry in self._sorted}

    def fills(self, most: int) -> bool:
        """Whether the next batch is full: no text that comes could join it without another one leaving it."""
        return bool(self._sorted) and self._bounds(most)[1] < len(self._sorted)

    def take(self, most: int) -> list[T]:
        """The next batch, of at most `most` padded tokens or of one text; empty when none waits."""
        if not self._sorted:
            return []
        first, end = self._bounds(most)
        batch = self._sorted[first:end]
        del self._sorted[first:end]
        for _, number, _ in batch:
            del self._by_number[number]
        return [text for _, _, text in batch]

    def _bounds(self, most: int) -> tuple[int, int]:
        """Of the batch with the text whose turn it is, by places in order of length."""
        while self._turns[0][1] not in self._by_number:
            heappop(self._turns)
        next_one = bisect_left(self._sorted, _place(self._by_number[self._turns[0][1]]), key=_place)
        first = 0
        while (end := self._end(first, most)) <= next_one:
            first = end
        return first, end

    def _end(self, first: int, most: int) -> int:
        """The longest batch that begins there: padded tokens only grow with each text that joins it."""
        low, high = first + 1, len(self._sorted)
        while low < high:
            middle = (low + high + 1) // 2
            if self._sorted[middle - 1][0] * (middle - first) <= most:
                low = middle
            else:
                high = middle - 1
        return low


def _place(entry: tuple[int, int, object]) -> tuple[int, int]:
    return entry[0], entry[1]
