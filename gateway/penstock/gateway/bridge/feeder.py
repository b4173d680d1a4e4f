"""Carries messages between the consumer, the book and the message handler. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from random import Random

from penstock.common import admin
from penstock.common.background import BackgroundTasks
from penstock.common.group_consumer import GroupConsumer, Read
from penstock.common.reader import Headers
from penstock.common.settings import KafkaSettings
from penstock.common.tasks import end_all
from penstock.common.telemetry import active
from penstock.gateway.bridge.known import Known
from penstock.gateway.bridge.message_handler import MessageHandler, TryAgain
from penstock.gateway.group_work import GroupWork
from penstock.gateway.queues.book import QueueBook, QueueMessage
from penstock.gateway.queues.merge import Merge
from penstock.gateway.queues.settings import QueueMergeSection, QueuePolicy, QueueSection
from penstock.gateway.traces import taken
from penstock.schemas.errors import PenstockError
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

GROUP = "penstock-queues"
ASK_S = 5.0
LOOK_S = 2.0
"""Between looks for topics that do not exist yet, or a broker that does not answer."""
_IDLE_S = 1.0


class QueueFeeder:
    """`start`, `cancel` and `work.leave` within one event loop.

    `counted` gets (topic, outcome) of each message that is settled, `waiting` (topic, how many messages wait here).
    """

    def __init__(
        self,
        queues: Sequence[QueueSection],
        policy: QueuePolicy,
        merging: QueueMergeSection,
        kafka: KafkaSettings,
        known: Known,
        handler: MessageHandler,
        *,
        counted: Callable[[str, str], None] = lambda topic, outcome: None,
        waiting: Callable[[str, int], None] = lambda topic, count: None,
        on_failure: Callable[[str], None],
    ) -> None:
        self._queues = list(queues)
        self._numbers = {queue.topic: number for number, queue in enumerate(self._queues)}
        self._merging = merging
        self._kafka = kafka
        self._known = known
        self._handler = handler
        self._counted = counted
        self._tell_waiting = waiting
        merge = Merge(policy, [queue.weight for queue in self._queues], Random())
        self._book = QueueBook(merge, len(self._queues), merging.window)
        self._tasks: dict[asyncio.Task[None], QueueMessage] = {}
        self._background = BackgroundTasks()
        self.offsets = self._book.offsets
        self.work = GroupWork(
            lambda listener: GroupConsumer(kafka, list(self._numbers), merging.group_id, listener, base=GROUP),
            self,
            None if active() is None else _all,  # only then are headers read
        )
        self.work.over.add_done_callback(lambda over: on_failure(over.result()))

    def start(self) -> None:
        """Read as soon as all topics are there."""
        self._background.start(self._begin(), "queues")

    async def cancel(self) -> None:
        """Begin nothing more. What is under way is left to the next reader of the queues."""
        await self._background.cancel()
        await self.work.cancel()
        await end_all(self._tasks)

    # -- the loop

    async def _begin(self) -> None:
        """When all topics are there and the request topics are read."""
        while (reason := await self._cannot_begin()) is not None:
            if reason != self.work.waits_for:
                logger.error("queues.waiting reason=%s: no queue is read until then", reason)
                self.work.reason = reason
            await asyncio.sleep(LOOK_S)
        self.work.start()
        logger.info("queues.reading topics=%s", ",".join(self._numbers))

    async def _cannot_begin(self) -> str | None:
        names = self._kafka.names
        wanted = {name for queue in self._queues for name in (queue.topic, queue.result_topic) if name is not None}
        wanted |= {*names.request_topics(), names.result, names.status, names.model, names.dlq}
        try:
            counts = await asyncio.to_thread(admin.partition_counts, self._kafka, None, ASK_S)
            if missing := sorted(name for name in wanted if not counts.get(name)):
                return f"missing topics: {', '.join(missing)}"
            await self._known.start()
        except PenstockError as error:
            return str(error)
        return None

    def assigned(self, partitions: list[TP]) -> None:
        """Their former owner may have sent requests for their messages."""
        self._known.look_again()
        self.offsets.assign(partitions)

    async def revoked(self, partitions: list[TP]) -> None:
        """Their next owner looks for what was sent here: all that was sent must stand on its topic by then."""
        self.work.commit()
        self._book.revoke(partitions)
        await end_all(task for task, message in self._tasks.items() if not message.taken)
        await self._handler.flush()

    def tend(self) -> float:
        self._known.check()
        for message in self._book.take(time.monotonic()):
            task = asyncio.get_running_loop().create_task(self._carry(message))
            self._tasks[task] = message
            task.add_done_callback(self._ended)
        for queue, count in zip(self._queues, self._book.buffered(), strict=True):
            self._tell_waiting(queue.topic, count)
        at = self._book.next_time()
        return _IDLE_S if at is None else max(0.0, min(_IDLE_S, at - time.monotonic()))

    def full(self, arriving: int, held: set[str]) -> set[str]:
        return {self._queues[number].topic for number in self._book.full()}

    def passed(self, tp: TP, position: int) -> None:
        """The book has what arrived."""

    async def take(self, batch: Sequence[Read]) -> None:
        for read in batch:
            number = self._numbers[read.tp[0]]
            message = QueueMessage(
                queue=number, tp=read.tp, offset=read.offset, value=read, pool=self._queues[number].pool
            )
            self._book.arrived(message)

    async def _carry(self, message: QueueMessage) -> None:
        """One message to its end, or to the time of its next try."""
        queue = self._queues[message.queue]
        try:
            with taken(message.value):
                outcome = await self._handler.run(queue, message.value, message.tries)
        except TryAgain as again:
            logger.info("queues.again topic=%s offset=%d code=%s", queue.topic, message.offset, again.error.code)
            self._again(message, tried=again.tried)
        except PenstockError as error:
            logger.warning("queues.answer_failed topic=%s offset=%d code=%s", queue.topic, message.offset, error.code)
            self._again(message, tried=False)
        except Exception:
            logger.exception("queues.errand_failed topic=%s offset=%d", queue.topic, message.offset)
            self._again(message, tried=False)
        else:
            self._book.settled(message)
            self._counted(queue.topic, outcome)
        finally:
            self.work.woken.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        message = self._tasks.pop(task)
        if not task.cancelled():
            task.result()  # what it raises is a fault, as of any callback
        elif not message.taken:  # others have it: here it ends without a trace
            self._book.settled(message)

    def _again(self, message: QueueMessage, *, tried: bool) -> None:
        self._counted(self._queues[message.queue].topic, "tried_again")
        self._book.again(message, time.monotonic() + self._merging.backoff_s, tried=tried)


def _all(headers: Headers) -> bool:
    return True
