"""The book of queues: what was read and is not settled, what may be sent next, what may be committed. Pure.

A message is *buffered* when it was read, *under way* from when it is chosen until its outcome is durable, and waits in
between when it is to be tried again. Its offset is committed when it and all before it in its partition are settled, so
a bridge that dies leaves to another what it had not finished; ids that are derived from the messages keep the repeats
from running twice.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.held_offsets import HeldOffsets
from penstock.gateway.queues.merge import Merge
from penstock.schemas.topics import TP


@dataclass(eq=False, kw_only=True, slots=True)
class QueueMessage:
    """One message of a queue. `pool` is where its request goes; `tries` counts those that ended without an outcome."""

    queue: int
    tp: TP
    offset: int
    value: Any
    pool: str | None = None
    tries: int = 0
    taken: bool = field(default=True)
    """The partition that it came from is still this bridge's."""


class QueueBook:
    """`window` bounds what is under way for one pool; of each queue at most twice as much is buffered."""

    def __init__(self, merge: Merge, queues: int, window: int) -> None:
        self._merge = merge
        self._window = window
        self._buffered: list[deque[QueueMessage]] = [deque() for _ in range(queues)]
        self._waiting: list[tuple[float, int, QueueMessage]] = []
        self._due: deque[QueueMessage] = deque()
        self._count = itertools.count()
        self._under_way: dict[str | None, int] = {}
        self.offsets = HeldOffsets[QueueMessage]()
        """It holds the messages that are not settled."""

    def revoke(self, partitions: Iterable[TP]) -> None:
        """These are others' now: what was read of them is forgotten; what is under way ends without a trace here."""
        for tp in partitions:
            for message in self.offsets.revoke(tp):
                message.taken = False
        self._buffered = [deque(one for one in buffer if one.taken) for buffer in self._buffered]
        self._due = deque(one for one in self._due if one.taken)
        self._waiting = [entry for entry in self._waiting if entry[2].taken]
        heapq.heapify(self._waiting)

    # -- messages

    def arrived(self, message: QueueMessage) -> bool:
        """A message was read. False for one of a partition that is not ours, or that is here already."""
        if message.tp not in self.offsets or message.offset < self.offsets.position(message.tp):
            return False
        self.offsets.hold(message.tp, message.offset, message)
        self.offsets.passed(message.tp, message.offset + 1)
        self._buffered[message.queue].append(message)
        return True

    def take(self, now: float) -> list[QueueMessage]:
        """All that may go out now, in the order of the policy; what waited for its time goes first. Times in s."""
        while self._waiting and self._waiting[0][0] <= now:
            self._due.append(heapq.heappop(self._waiting)[2])
        taken: list[QueueMessage] = []
        for message in list(self._due):
            if self._has_room(message):
                self._due.remove(message)
                taken.append(self._begin(message))
        while ready := self._ready():
            taken.append(self._begin(self._buffered[self._merge.next(ready)].popleft()))
        return taken

    def again(self, message: QueueMessage, at: float, *, tried: bool) -> None:
        """It is to be tried again at this time. `tried`: its request had an outcome, so the next is a new request."""
        self._end(message)
        message.tries += tried
        if message.taken:
            heapq.heappush(self._waiting, (at, next(self._count), message))

    def settled(self, message: QueueMessage) -> None:
        """What became of it is durable."""
        self._end(message)
        if message.taken:
            self.offsets.release(message.tp, message.offset)

    def next_time(self) -> float | None:
        """When something that waits is due; what is due already goes as soon as there is room."""
        return self._waiting[0][0] if self._waiting else None

    def full(self) -> set[int]:
        """Queues of which no more is to be read for now."""
        return {number for number, buffer in enumerate(self._buffered) if len(buffer) >= 2 * self._window}

    def buffered(self) -> Sequence[int]:
        """By queue, what was read and not begun."""
        return [len(buffer) for buffer in self._buffered]

    # -- in here

    def _ready(self) -> list[int]:
        return [number for number, buffer in enumerate(self._buffered) if buffer and self._has_room(buffer[0])]

    def _has_room(self, message: QueueMessage) -> bool:
        return self._under_way.get(message.pool, 0) < self._window

    def _begin(self, message: QueueMessage) -> QueueMessage:
        self._under_way[message.pool] = self._under_way.get(message.pool, 0) + 1
        return message

    def _end(self, message: QueueMessage) -> None:
        self._under_way[message.pool] -= 1
