"""A Faust transport whose consumer is librdkafka's: Faust keeps its app, its agents and its part in a rebalance.

It consumes only: no tables, no producing, no acks; commits are the worker's own (`PollThread.commit`). An agent gets
one event for each batch, whose value is the `Batch`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from faust.transport import base
from faust.transport.consumer import Consumer
from faust.transport.drivers import TRANSPORTS
from faust.types import TP as FaustTP
from faust.types import ConsumerMessage

from penstock.common.threads import in_daemon_thread
from penstock.processors.kafka.batches import TP, Batch, Committed
from penstock.processors.kafka.poll_thread import PollThread

SCHEME = "rdkafka"
NO_TIMESTAMP = 0


class RdKafkaConsumer(Consumer):
    """Joins Faust to the poll thread. `thread` is set before the app starts."""

    logger = logging.getLogger("faust.rdkafka")  # mode would name it after this module
    thread: PollThread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batches: deque[Batch] = deque()
        self._arrived = asyncio.Event()
        self._positions: Mapping[TP, Committed] = {}

    # -- from the poll thread, on the event loop

    def handed_over(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._arrived.set()

    async def revoked(self) -> None:
        """Faust empties its agents' queues."""
        self._batches.clear()
        app: Any = self.app
        app.on_rebalance_start()
        await self.on_partitions_revoked(self.assignment())
        self._positions = {}

    async def assigned(self, generation: int, committed: Mapping[TP, Committed]) -> None:
        self._batches.clear()
        self._positions = committed
        app: Any = self.app
        if not app.rebalancing:  # the first assignment
            app.on_rebalance_start()
        app.consumer_generation_id = generation
        await self.on_partitions_assigned(self.assignment(), generation)

    # -- for Faust

    async def _drain_messages(self, fetcher: Any) -> None:
        """One event for each batch, straight into the queue of its topic's agent."""
        app: Any = self.app
        while not (self._stopped.is_set() or fetcher._stopped.is_set()):
            while not self._batches:
                self._arrived.clear()
                await self._arrived.wait()
            if not self.flow_active:  # a rebalance: what is before it is emptied there
                await self.can_resume_flow.wait()
                continue
            batch = self._batches.popleft()
            if batch.generation != app.consumer_generation_id:
                continue
            tp = FaustTP(*batch.tp)
            (channel,) = app.topics._tp_index[tp]
            value: Any = batch
            message = ConsumerMessage(
                batch.topic, batch.partition, batch.end, NO_TIMESTAMP, 0, None, None, value, None, -1, -1, tp,
                generation_id=batch.generation,
            )  # fmt: skip
            message.refcount = 1
            channel.queue.force_put_nowait(app.create_event(None, batch, None, message))

    async def subscribe(self, topics: Iterable[str]) -> None:
        self.thread.subscribe(list(topics))

    async def on_stop(self) -> None:
        await in_daemon_thread(self.thread.stop)

    def assignment(self) -> set[FaustTP]:
        return {FaustTP(*tp) for tp in self._positions}

    async def seek_to_committed(self) -> Mapping[FaustTP, int]:
        """Faust only asks where that is: the poll thread has begun there already."""
        return {FaustTP(*tp): offset for tp, (offset, _) in self._positions.items()}

    def _new_topicpartition(self, topic: str, partition: int) -> FaustTP:
        return FaustTP(topic, partition)

    async def _commit(self, offsets: Mapping[FaustTP, int]) -> bool:
        return False  # nothing is acked through Faust

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("only tables and acks need this")

    _getmany = _seek = _to_message = create_topic = earliest_offsets = highwater = highwaters = _unused
    key_partition = position = seek_wait = topic_partitions = _unused


class NoProducer(base.Producer):
    """Outcomes leave through the worker's own publisher."""

    logger = logging.getLogger("faust.rdkafka")

    async def flush(self) -> None: ...


class Transport(base.Transport):
    Consumer = RdKafkaConsumer
    Producer = NoProducer
    default_port = 9092
    driver_version = "librdkafka"


TRANSPORTS.aliases[SCHEME] = f"{__name__}:Transport"
