"""What is queued for one engine: its eligible items by class, and among them those that have waited long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import Generic, Protocol, TypeVar

from penstock.processors.core.fairqueue import Entry, FairQueue

CLASSES: tuple[str, ...] = ("high", "medium", "low")


class Item(Protocol):
    """A request that can be queued. Times are seconds of the caller's clock.

    `ticket` is the scheduler's; 0 means that the item is not queued. What is read here must not change while the item
    is queued, but for `cost`.
    """

    klass: str
    priority: int
    ticket: int

    @property
    def tenant(self) -> str: ...
    @property
    def lane(self) -> str: ...
    @property
    def line(self) -> str | None: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def cost(self) -> int: ...
    @property
    def seq(self) -> int: ...


ItemT = TypeVar("ItemT", bound=Item)


class Place(Generic[ItemT]):
    """A queued item's place: `entry` among the eligible of its class, `aged_entry` among the aged of it."""

    __slots__ = ("aged", "aged_entry", "entry", "item", "klass", "returned", "seq", "ticket", "turn")

    def __init__(self, item: ItemT, ticket: int, *, returned: bool) -> None:
        self.item = item
        self.ticket = ticket
        self.klass = item.klass
        self.seq = item.seq
        self.turn = (item.seq, ticket)
        self.returned = returned  # it was started before and holds its line
        self.aged = False
        self.entry: Entry | None = None
        self.aged_entry: Entry | None = None

    @property
    def cost(self) -> int:
        return self.item.cost


class ByTime(Generic[ItemT]):
    """Places by a time of theirs. Those that left the queue stay until they stand first or are the most."""

    __slots__ = ("_heap", "_places")

    def __init__(self, places: Mapping[int, Place[ItemT]]) -> None:
        self._places = places  # all that are queued, by ticket
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, time: float, place: Place[ItemT], queued_at_most: int) -> None:
        """`queued_at_most`: no more than so many of those within are queued still."""
        if len(self._heap) > 2 * queued_at_most + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._places]
            heapify(self._heap)
        heappush(self._heap, (time, place.ticket))

    def first(self) -> float | None:
        heap = self._heap
        while heap and heap[0][1] not in self._places:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop_before(self, time: float) -> Iterator[Place[ItemT]]:
        while (first := self.first()) is not None and first < time:
            yield self._places[heappop(self._heap)[1]]

    def up_to(self, time: float, at_most: int) -> list[Place[ItemT]]:
        """The first whose time has come, in the order of the times; they stay."""
        due: list[tuple[float, int]] = []
        while len(due) < at_most and (first := self.first()) is not None and first <= time:
            due.append(heappop(self._heap))
        for entry in due:
            heappush(self._heap, entry)
        return [self._places[ticket] for _, ticket in due]


class Lane(Generic[ItemT]):
    """What is queued for one engine."""

    __slots__ = ("aged", "arrivals", "depths", "queues", "since_aged")

    def __init__(self, places: Mapping[int, Place[ItemT]]) -> None:
        self.queues: dict[str, FairQueue[Place[ItemT]]] = {klass: FairQueue() for klass in CLASSES}
        self.aged: dict[str, FairQueue[Place[ItemT]]] = {klass: FairQueue() for klass in CLASSES[1:]}
        self.arrivals: dict[str, ByTime[ItemT]] = {
            klass: ByTime(places) for klass in CLASSES[1:]
        }  # of what is not aged yet
        self.depths = dict.fromkeys(CLASSES, 0)
        self.since_aged = 0  # starts since the last one that was an aged item's turn

    def strict(self) -> str | None:
        """The most urgent class that has eligible items."""
        for klass, queue in self.queues.items():  # in the order of CLASSES
            if queue:
                return klass
        return None

    def admit(self, place: Place[ItemT], *, refund: bool = False) -> None:
        """The item becomes eligible. `refund`: its tenant paid for it before, and gets that back."""
        item = place.item
        deadline = inf if item.deadline is None else item.deadline
        place.entry = (item.priority, deadline, place.seq, place.ticket, place)
        if refund:
            self.queues[place.klass].put_back(item.tenant, place.entry, item.cost)
        else:
            self.queues[place.klass].add(item.tenant, place.entry)
        if place.aged:
            self.admit_aged(place)

    def admit_aged(self, place: Place[ItemT]) -> None:
        place.aged_entry = (place.item.arrived_at, place.seq, place.ticket, place)
        self.aged[place.klass].add(place.item.tenant, place.aged_entry)

    def withdraw(self, place: Place[ItemT]) -> None:
        """The item is not eligible any more, and was not started."""
        if place.entry is not None:
            self.queues[place.klass].remove(place.item.tenant, place.entry)
        if place.aged_entry is not None:
            self.aged[place.klass].remove(place.item.tenant, place.aged_entry)
        place.entry = place.aged_entry = None

    def take(self, place: Place[ItemT], entry: Entry) -> None:
        """The item starts."""
        item = place.item
        self.queues[place.klass].take(item.tenant, entry, item.cost)
        if place.aged_entry is not None:
            self.aged[place.klass].take(item.tenant, place.aged_entry, item.cost)
        place.entry = place.aged_entry = None

    def grow_old(self, before: float) -> None:
        """What arrived before a time is aged from now on."""
        for arrivals in self.arrivals.values():
            for place in arrivals.pop_before(before):
                place.aged = True
                if place.entry is not None:
                    self.admit_aged(place)
