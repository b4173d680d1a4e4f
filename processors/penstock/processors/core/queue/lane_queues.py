"""What is queued for one engine: its eligible items by class, and among them those that have waited long."""

from __future__ import annotations

from collections.abc import Iterator, Set
from heapq import merge
from math import inf
from typing import Generic, Protocol, TypeVar

from penstock.processors.core.queue.fairqueue import Entry, FairQueue, Sorted
from penstock.processors.core.queue.slack import EngineSlack
from penstock.schemas.topics import CLASSES, RANKS


class Item(Protocol):
    """A request that can be queued. Times are seconds of the caller's clock.

    `ticket` is the scheduler's; 0 means that the item is not queued. What is read here must not change while the item
    is queued, but for `cost`.
    """

    klass: str
    lane: str
    priority: int
    ticket: int

    @property
    def tenant(self) -> str: ...
    @property
    def conversation(self) -> str | None: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def arrived_at(self) -> float: ...
    @property
    def cost(self) -> int: ...
    @property
    def seq(self) -> int: ...


ItemT = TypeVar("ItemT", bound=Item)


class QueuedItem(Generic[ItemT]):
    """An item and where it is queued: `entry` among the eligible of its class, `aged_entry` among the aged of it."""

    __slots__ = ("aged", "aged_entry", "entry", "item", "klass", "returned", "seq", "ticket")

    def __init__(self, item: ItemT, ticket: int, *, returned: bool) -> None:
        self.item = item
        self.ticket = ticket
        self.klass = item.klass
        self.seq = item.seq
        self.returned = returned  # it was started before and holds its conversation
        self.aged = False
        self.entry: Entry | None = None
        self.aged_entry: Entry | None = None

    @property
    def cost(self) -> int:
        return self.item.cost


class LaneQueues(Generic[ItemT]):
    """What is queued for one engine."""

    __slots__ = ("aged", "arrivals", "depths", "queues", "since_aged", "slack")

    def __init__(self, slack: EngineSlack) -> None:
        self.slack = slack
        self.queues: dict[str, FairQueue[QueuedItem[ItemT]]] = {klass: FairQueue() for klass in CLASSES}
        self.aged: dict[str, FairQueue[QueuedItem[ItemT]]] = {klass: FairQueue() for klass in CLASSES[1:]}
        self.arrivals = {klass: Sorted() for klass in CLASSES[1:]}  # of what is not aged yet
        self.depths = dict.fromkeys(CLASSES, 0)
        self.since_aged = 0  # starts since the last one that was an aged item's turn

    def strict(self, paused: Set[str]) -> str | None:
        """The most urgent class that has eligible items and is not paused."""
        for klass, queue in self.queues.items():  # in the order of CLASSES
            if queue and klass not in paused:
                return klass
        return None

    def aged_below(self, klass: str, paused: Set[str]) -> Iterator[QueuedItem[ItemT]]:
        """The aged items of less urgent classes that are not paused, those that arrived first in front."""
        classes = [lower for lower in CLASSES[RANKS[klass] + 1 :] if lower not in paused]
        return merge(*(self.aged[lower] for lower in classes if self.aged[lower]), key=lambda one: one.item.arrived_at)

    def admit(self, queued: QueuedItem[ItemT], *, refund: bool = False) -> None:
        """The item becomes eligible. `refund`: its tenant paid for it before, and gets that back."""
        item = queued.item
        deadline = inf if item.deadline is None else item.deadline
        queued.entry = (item.priority, deadline, queued.seq, queued.ticket, queued)
        if refund:
            self.queues[queued.klass].put_back(item.tenant, queued.entry, item.cost)
        else:
            self.queues[queued.klass].add(item.tenant, queued.entry)
        if queued.aged:
            self.admit_aged(queued)

    def admit_aged(self, queued: QueuedItem[ItemT]) -> None:
        queued.aged_entry = (queued.item.arrived_at, queued.seq, queued.ticket, queued)
        self.aged[queued.klass].add(queued.item.tenant, queued.aged_entry)

    def withdraw(self, queued: QueuedItem[ItemT]) -> None:
        """The item is not eligible any more, and was not started."""
        if queued.entry is not None:
            self.queues[queued.klass].remove(queued.item.tenant, queued.entry)
        if queued.aged_entry is not None:
            self.aged[queued.klass].remove(queued.item.tenant, queued.aged_entry)
        queued.entry = queued.aged_entry = None

    def take(self, queued: QueuedItem[ItemT], entry: Entry) -> None:
        item = queued.item
        self.queues[queued.klass].take(item.tenant, entry, item.cost)
        if queued.aged_entry is not None:
            self.aged[queued.klass].take(item.tenant, queued.aged_entry, item.cost)
        queued.entry = queued.aged_entry = None

    def grow_old(self, before: float) -> None:
        """What arrived before a time is aged from now on."""
        for arrivals in self.arrivals.values():
            while (first := arrivals.first()) is not None and first[0] < before:
                arrivals.remove(first)
                queued: QueuedItem[ItemT] = first[-1]
                queued.aged = True
                if queued.entry is not None:
                    self.admit_aged(queued)
