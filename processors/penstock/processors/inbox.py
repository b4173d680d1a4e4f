"""Batches that were delivered and not taken yet: the more urgent topics first, each partition in its order.

A partition whose next record cannot be read yet is set aside for a moment, and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock.processors.kafka.batches import TP, Batch

FIRST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.1
"""A schema registry answers within milliseconds; one that is away is asked ten times a second."""
LONG = 5
"""How often in a row a partition is set aside within a quarter of a second."""


@dataclass(eq=False, slots=True)
class PendingBatch:
    """A batch that waits, and how far it was taken."""

    batch: Batch
    urgency: int
    at: int = 0
    """How many of its records were taken."""
    announced: bool = False
    """Whether the owner of offsets knows of it."""


class Inbox:
    """`urgency` of a topic: lower comes first. A batch that is taken to its end gives its room back to the consumer."""

    def __init__(self, urgency: Callable[[str], int]) -> None:
        self._urgency = urgency
        self._queues: dict[int, deque[PendingBatch]] = {}
        self._aside: dict[TP, tuple[float, int]] = {}
        """Partitions that wait: until when, and how often in a row they were set aside."""

    def put(self, batch: Batch) -> None:
        urgency = self._urgency(batch.topic)
        queue = self._queues.get(urgency)
        if queue is None:
            queue = self._queues[urgency] = deque()
            self._queues = dict(sorted(self._queues.items()))
        queue.append(PendingBatch(batch, urgency))

    def first(self, now: float) -> PendingBatch | None:
        """The batch to be taken next; None when there is none but those of partitions that are set aside."""
        for queue in self._queues.values():
            for pending in queue:
                if not self._aside or now >= self._aside.get(pending.batch.tp, (now, 0))[0]:
                    return pending
        return None

    def done(self, pending: PendingBatch) -> None:
        """All its records were taken."""
        self._queues[pending.urgency].remove(pending)
        pending.batch.taken()

    def set_aside(self, pending: PendingBatch, now: float) -> int:
        """Its next record cannot be read yet: its partition waits a moment. How often in a row it was set aside.

        The room of its batches is given back, or other partitions would wait for this one. `aside` tells the consumer
        to hand over no more of it.
        """
        tp = pending.batch.tp
        _, times = self._aside.get(tp, (now, 0))
        self._aside[tp] = now + min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(times, 10)), times + 1
        for one in self._queues[pending.urgency]:
            if one.batch.tp == tp:
                one.batch.taken()
        return times + 1

    def was_read(self, pending: PendingBatch) -> None:
        """Its next record was read: its partition waits no more."""
        if self._aside:
            self._aside.pop(pending.batch.tp, None)

    @property
    def aside(self) -> frozenset[TP]:
        """The partitions that were set aside, until the record for which they were is read."""
        return frozenset(self._aside)

    @property
    def waits_long(self) -> bool:
        """Whether a partition was set aside so often in a row that what is asked seems to be away."""
        return any(times >= LONG for _, times in self._aside.values())

    def clear(self) -> int:
        """Forget all batches. Returns how many records had not been taken."""
        untaken = 0
        self._aside.clear()
        for queue in self._queues.values():
            for pending in queue:
                untaken += len(pending.batch.records) - pending.at
                pending.batch.taken()
            queue.clear()
        return untaken

    def __bool__(self) -> bool:
        return any(self._queues.values())
