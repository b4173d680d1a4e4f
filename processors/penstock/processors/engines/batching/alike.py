"""Requests that wait, in batches of those that are alike: the one whose turn it is, and others with its key."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class AlikeBatches(Generic[ItemT]):
    """`key`: items with equal keys can be computed together. `weight`: what one counts of a batch. `Waiting`."""

    def __init__(self, key: Callable[[ItemT], Hashable], weight: Callable[[ItemT], int] = lambda item: 1) -> None:
        self._key = key
        self._weight = weight
        self._items: list[tuple[float, Hashable, ItemT]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: ItemT, turn: float) -> None:
        """The smallest turn is first."""
        insort(self._items, (turn, self._key(item), item), key=itemgetter(0))

    def drop(self, unwanted: Callable[[ItemT], bool]) -> None:
        self._items = [entry for entry in self._items if not unwanted(entry[2])]

    def fills(self, most: int) -> bool:
        """Whether the next batch holds as much as it may."""
        batch = self._next(most)
        return sum(map(self._weight, batch)) >= most or len(batch) < len(self._alike())

    def take(self, most: int) -> list[ItemT]:
        batch = self._next(most)
        taken = set(map(id, batch))
        self._items = [entry for entry in self._items if id(entry[2]) not in taken]
        return batch

    def _alike(self) -> list[ItemT]:
        return [item for _, key, item in self._items if key == self._items[0][1]]

    def _next(self, most: int) -> list[ItemT]:
        batch: list[ItemT] = []
        weight = 0
        for item in self._alike():
            weight += self._weight(item)
            if batch and weight > most:
                break
            batch.append(item)
        return batch
