"""Batches that were delivered and not taken yet: the more urgent topics first, each partition in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.kafka.membership import Batch


@dataclass(slots=True)
class PendingBatch:
    """A batch that waits, and how far it was taken."""

    batch: Batch
    urgency: int
    at: int = 0
    """How many of its records were taken."""
    announced: bool = False
    """Whether the commit gate knows of it."""

    @property
    def tp(self) -> tuple[str, int]:
        return (self.batch.topic, self.batch.partition)


class Inbox:
    """`urgency` of a topic: lower comes first. A batch that is taken to its end gives its room back to the consumer."""

    def __init__(self, urgency: Callable[[str], int]) -> None:
        self._urgency = urgency
        self._queues: dict[int, deque[PendingBatch]] = {}

    def put(self, batch: Batch) -> None:
        """A batch was delivered."""
        urgency = self._urgency(batch.topic)
        queue = self._queues.get(urgency)
        if queue is None:
            queue = self._queues[urgency] = deque()
            self._queues = dict(sorted(self._queues.items()))
        queue.append(PendingBatch(batch, urgency))

    def first(self) -> PendingBatch | None:
        """The batch to be taken next; None when there is none."""
        for queue in self._queues.values():
            if queue:
                return queue[0]
        return None

    def done(self, pending: PendingBatch) -> None:
        """All records of `first` were taken."""
        self._queues[pending.urgency].popleft()
        pending.batch.taken()

    def clear(self) -> int:
        """Forget all batches. Returns how many records had not been taken."""
        untaken = 0
        for queue in self._queues.values():
            for pending in queue:
                untaken += len(pending.batch.records) - pending.at
                pending.batch.taken()
            queue.clear()
        return untaken

    def __bool__(self) -> bool:
        return any(self._queues.values())
