"""For the worker as it is: turns each batch into the events that `Worker.on_event` takes, and their acks into commits.

To be deleted when the worker takes batches itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from penstock.processors.kafka.batches import TP, Assignment, Batch, Committed, Delivered


class _Message:
    __slots__ = ("generation_id", "headers", "key", "offset", "partition", "timestamp", "topic", "value")

    def __init__(self, batch: Batch, record: Delivered) -> None:
        self.topic, self.partition, self.offset = batch.topic, batch.partition, record.offset
        self.timestamp = record.timestamp_ms / 1000
        self.headers, self.key, self.value = record.headers, record.key, record.value
        self.generation_id = batch.generation


class _Event:
    __slots__ = ("_acks", "message", "value")

    def __init__(self, acks: EventAcks, batch: Batch, record: Delivered) -> None:
        self._acks = acks
        self.message = _Message(batch, record)
        self.value = record.value

    def ack(self) -> None:
        message = self.message
        self._acks.acked((message.topic, message.partition), message.offset, message.generation_id)


class EventAcks:
    """Follows which delivered offsets are acked; a partition's head without a gap is what is committed."""

    def __init__(self, on_event: Callable[[Any], None], on_assigned: Callable[[Assignment], None]) -> None:
        self._on_event = on_event
        self._on_assigned = on_assigned
        self._generation = -1
        self._open: dict[TP, dict[int, None]] = {}  # delivered and not acked, in offset order
        self._ends: dict[TP, int] = {}
        self._committed: dict[TP, int] = {}

    def on_assigned(self, assignment: Assignment) -> None:
        self._generation = assignment.generation
        self._committed = {tp: offset for tp, (offset, _) in assignment.committed.items()}
        self._ends = dict(self._committed)
        self._open = {tp: {} for tp in assignment.partitions}
        self._on_assigned(assignment)

    def on_batch(self, batch: Batch) -> None:
        if batch.start != self._ends[batch.tp]:
            raise RuntimeError(f"{batch} does not join to {self._ends[batch.tp]}")
        self._ends[batch.tp] = batch.end
        self._open[batch.tp].update(dict.fromkeys(record.offset for record in batch.records))
        for record in batch.records:
            self._on_event(_Event(self, batch, record))
        batch.taken()

    def acked(self, tp: TP, offset: int, generation: int) -> None:
        if generation == self._generation:
            self._open[tp].pop(offset, None)

    def commits(self) -> Mapping[TP, Committed]:
        """What should be committed and is not."""
        heads = {tp: next(iter(held), self._ends[tp]) for tp, held in self._open.items()}
        return {tp: (head, "") for tp, head in heads.items() if head > self._committed[tp]}

    def committed(self, results: Mapping[TP, bool], asked: Mapping[TP, Committed]) -> None:
        for tp, taken in results.items():
            if taken and tp in self._committed:
                self._committed[tp] = max(self._committed[tp], asked[tp][0])


async def commit_forever(membership: Any, acks: EventAcks, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await commit_now(membership, acks)


async def commit_now(membership: Any, acks: EventAcks) -> None:
    asked = acks.commits()
    if asked:
        acks.committed(await membership.commit(asked), asked)
