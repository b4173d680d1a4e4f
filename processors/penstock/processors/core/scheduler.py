"""The scheduler: which queued request starts next. Strict classes with a share for what has waited long; turns in line.

Within a class items go by arrival. An item's *lane* is its engine: what cannot start now on one lane never holds up
another. A *line* is a conversation: its items become eligible one at a time, in the order they were added.
`docs/decisions/0007` argues aging by share.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from heapq import merge
from itertools import islice, takewhile
from typing import Any

WorkKey = tuple[str, int, int]
CLASSES: tuple[str, ...] = ("high", "medium", "low")


class Decision(Enum):
    """Whether an item may start now."""

    GRANTED = auto()
    WAIT = auto()  # not this item; others of its lane may
    BLOCK_LANE = auto()  # nothing on this lane


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A queued request. Times are seconds of the caller's clock."""

    key: WorkKey
    request_id: str
    tenant: str
    klass: str
    priority: int
    lane: str
    line: str | None
    enqueued_at: float
    deadline: float | None
    work: Any


class Full(Exception):
    """The scheduler holds as many items as it may."""


class Scheduler:
    """Bounded. What has waited longer than `aging_s` is aged; of `aged_share` dispatches one is for the aged."""

    def __init__(self, *, aging_s: float, aged_share: int, capacity: int) -> None:
        if aged_share < 2:
            raise ValueError("aged_share must be at least 2, or aged work would come before all other")
        self._aging_s = aging_s
        self._aged_share = aged_share
        self._capacity = capacity
        self._items: dict[WorkKey, Item] = {}
        self._depths = dict.fromkeys(CLASSES, 0)
        # Eligible items by class and lane, oldest first: of a line only its first item is among them.
        self._ready: dict[str, dict[str, OrderedDict[WorkKey, Item]]] = {klass: {} for klass in CLASSES}
        self._lines: dict[str, deque[WorkKey]] = {}  # waiting items of each line that is open, in order
        self._busy: dict[str, WorkKey] = {}  # line → the item that is eligible or running
        self._running_lines: set[str] = set()
        self._since_aged = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: WorkKey) -> bool:
        return key in self._items

    def add(self, item: Item) -> None:
        """Queue an item. Raises Full at the limit, ValueError for a key that is queued already."""
        if item.key in self._items:
            raise ValueError(f"{item.key} is queued already")
        if len(self._items) >= self._capacity:
            raise Full
        self._items[item.key] = item
        self._depths[item.klass] += 1
        if item.line is not None:
            if item.line in self._busy or item.line in self._running_lines:
                self._lines.setdefault(item.line, deque()).append(item.key)
                return
            self._busy[item.line] = item.key
        self._make_ready(item)

    def _make_ready(self, item: Item) -> None:
        queue = self._ready[item.klass].setdefault(item.lane, OrderedDict())
        newest = next(reversed(queue.values()), None)
        queue[item.key] = item
        if newest is not None and newest.enqueued_at > item.enqueued_at:
            # A turn that waited for its line stands where it arrived, not behind those who came after it.
            ordered = sorted(queue.values(), key=lambda one: one.enqueued_at)
            self._ready[item.klass][item.lane] = OrderedDict((one.key, one) for one in ordered)

    def next(self, now: float, can_start: Callable[[Item], Decision]) -> Item | None:
        """The item that starts now, which leaves the queue; its line stays taken until `release_line`."""
        blocked: set[str] = set()
        if self._since_aged >= self._aged_share - 1:
            aged = self._pick_aged(now, can_start, blocked)
            if aged is not None:
                self._since_aged = 0
                return self._start(aged)
        for klass in CLASSES:
            item = self._pick(self._heads(klass), can_start, blocked)
            if item is not None:
                self._since_aged = min(self._since_aged + 1, self._aged_share)
                return self._start(item)
        return None

    def _heads(self, klass: str) -> list[Iterator[Item]]:
        return [iter(queue.values()) for queue in self._ready[klass].values()]

    def _pick_aged(self, now: float, can_start: Callable[[Item], Decision], blocked: set[str]) -> Item | None:
        """The longest waiting of the aged of all classes below the highest."""
        heads: list[Iterator[Item]] = [
            takewhile(lambda item: now - item.enqueued_at > self._aging_s, queue.values())
            for klass in CLASSES[1:]
            for queue in self._ready[klass].values()
        ]
        return self._pick(heads, can_start, blocked)

    @staticmethod
    def _pick(queues: list[Iterator[Item]], can_start: Callable[[Item], Decision], blocked: set[str]) -> Item | None:
        """The oldest item of the queues that may start; a queue is asked no further than it must."""
        fronts = [(item, queue) for queue in queues if (item := next(queue, None)) is not None]
        while fronts:
            at = min(range(len(fronts)), key=lambda index: fronts[index][0].enqueued_at)
            item, queue = fronts[at]
            decision = Decision.BLOCK_LANE if item.lane in blocked else can_start(item)
            if decision is Decision.GRANTED:
                return item
            following = None
            if decision is Decision.BLOCK_LANE:
                blocked.add(item.lane)
            else:
                following = next(queue, None)
            if following is None:
                del fronts[at]
            else:
                fronts[at] = (following, queue)
        return None

    def _start(self, item: Item) -> Item:
        del self._items[item.key]
        self._depths[item.klass] -= 1
        self._unready(item)
        if item.line is not None:
            self._busy.pop(item.line, None)
            self._running_lines.add(item.line)
        return item

    def _unready(self, item: Item) -> bool:
        lanes = self._ready[item.klass]
        queue = lanes.get(item.lane)
        if queue is None or queue.pop(item.key, None) is None:
            return False
        if not queue:
            del lanes[item.lane]
        return True

    def release_line(self, line: str) -> None:
        """The running turn of a line has ended: its next one becomes eligible."""
        self._running_lines.discard(line)
        if line not in self._busy:
            self._open_next(line)

    def _open_next(self, line: str) -> None:
        waiting = self._lines.get(line)
        if not waiting:
            self._lines.pop(line, None)
            return
        key = waiting.popleft()
        if not waiting:
            del self._lines[line]
        self._busy[line] = key
        self._make_ready(self._items[key])

    def remove(self, key: WorkKey) -> Item | None:
        """Take an item out (cancelled, expired, revoked); None when it is not queued."""
        item = self._items.pop(key, None)
        if item is None:
            return None
        self._depths[item.klass] -= 1
        self._unready(item)
        if item.line is not None:
            if self._busy.get(item.line) == key:
                del self._busy[item.line]
                self._open_next(item.line)
            elif (waiting := self._lines.get(item.line)) is not None:
                waiting.remove(key)
                if not waiting:
                    del self._lines[item.line]
        return item

    def reprioritize(self, key: WorkKey, *, klass: str, priority: int) -> bool:
        """Move an item to another class, in the place of its arrival there; False when it is not queued."""
        item = self._items.get(key)
        if item is None:
            return False
        changed = replace(item, klass=klass, priority=priority)
        self._items[key] = changed
        self._depths[item.klass] -= 1
        self._depths[klass] += 1
        if self._unready(item):
            self._make_ready(changed)
        return True

    def expired(self, now: float) -> list[Item]:
        """Queued items whose deadline has passed; they stay until `remove`."""
        return [item for item in self._items.values() if item.deadline is not None and item.deadline <= now]

    def up_to(self, klass: str) -> int:
        """How many items are queued in a class and those above it: where a newcomer of the class stands."""
        return sum(self._depths[one] for one in CLASSES[: CLASSES.index(klass) + 1])

    def front(self, count: int) -> list[Item]:
        """The first eligible items, by class and arrival: the order of starting, but for aging and full lanes."""
        found: list[Item] = []
        for klass in CLASSES:
            queues = (queue.values() for queue in self._ready[klass].values())
            found += islice(merge(*queues, key=lambda item: item.enqueued_at), count - len(found))
        return found

    def depths(self) -> dict[str, int]:
        """Queued items by class, those behind their line included."""
        return dict(self._depths)

    def oldest_age(self, now: float) -> dict[str, float]:
        """Seconds that the longest waiting item of each class has waited; 0 for an empty one."""
        found = dict.fromkeys(CLASSES, 0.0)
        for item in self._items.values():
            found[item.klass] = max(found[item.klass], now - item.enqueued_at)
        return found
