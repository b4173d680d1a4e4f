"""Feeds a desk: the facts of conversations, and the topics of those that are to be summed up by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.common import admin
from penstock.common.conversations import Turn, read_conversation, standing
from penstock.common.reader import BatchQueue, Headers, PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer.desk import Commit, Desk, Key, ReadWhole
from penstock.gateway.summarizer.progress import Progress
from penstock.schemas.errors import DecodeError, InternalError, NotFound, PenstockError, RegistryUnavailable
from penstock.schemas.records import ConversationFacts, ConversationMessage
from penstock.schemas.registry import Codecs
from penstock.schemas.topics import conversation_of_key

logger = logging.getLogger(__name__)

AGAIN_S, REGISTRY_AGAIN_S, COMMIT_S, UNREAD_S = 1.0, 0.1, 1.0, 0.5
CAUGHT_UP_S, WHOLE_S = 120.0, 120.0
BEGUN_AT_ONCE = 200
"""Conversations whose reading begins in one go."""
REACHED: Headers = (("reached", None),)
"""Marks what is no record: its offset tells where the reader stands, behind all batches before it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the reading of a topic begins. `committed`: up to there a predecessor has seen it summed up; else 0.

    `base`: what its offsets count from, if it is a fork and something is committed.
    """

    topic_id: str
    begin: int
    committed: int
    base: int
    end: int


class Following:
    """On one event loop. `on_change` is told when something may be due."""

    def __init__(
        self,
        kafka: KafkaSettings,
        codecs: Codecs,
        desk: Desk,
        progress: Progress,
        look_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._kafka = kafka
        self._codecs = codecs
        self._desk = desk
        self._progress = progress
        self._look_s = look_s
        self._on_change = on_change
        self._queue = BatchQueue(asyncio.get_running_loop())
        facts = kafka.names.conversation_facts
        self._reader = PartitionReader(kafka, [facts], self._queue.put, fetch_wait_ms=500, name="penstock-summarizer")
        self._folded = asyncio.Event()
        self._whole: asyncio.Queue[Key] = asyncio.Queue()
        self._topic_ids: dict[Key, str] = {}
        self._commits: dict[Key, Commit] = {}
        self.waits_for: str | None = "starting"
        """Why not all is followed now."""

    async def run(self) -> None:
        """Until it is cancelled. Raises InternalError when only a new process can go on."""
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._feed())
                await self._patiently(lambda: asyncio.to_thread(self._start_reader))
                await self._patiently(self._read_facts)
                logger.info("summarizer.started")
                for part in (self._look_forever, self._read_whole_forever, self._commit_forever, self._mark_forever):
                    parts.create_task(part())
        finally:
            self._queue.close()
            await asyncio.to_thread(self._reader.stop)

    def forget(self, key: Key) -> None:
        """Its topic is gone or another one; the next look finds out."""
        self._desk.forget(key)
        self._topic_ids.pop(key, None)
        self._commits.pop(key, None)
        self._reader.call(lambda: self._reader.drop((self._topic(key), 0)))

    async def _patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it, again until Kafka and the registry let it be done."""
        while True:
            try:
                found = await work()
            except InternalError:
                raise
            except PenstockError as error:
                if self.waits_for != error.message:
                    logger.warning("summarizer.waits error=%s reason=%s", error.code, error.message)
                self.waits_for = error.message
                await asyncio.sleep(AGAIN_S)
            else:
                self.waits_for = None
                return found

    def _start_reader(self) -> None:
        """On a thread. Raises BrokerUnavailable, which names the brokers that were asked, and NotFound."""
        admin.partition_counts(self._kafka)
        self._reader.start()

    def _topic(self, key: Key) -> str:
        return self._kafka.names.conversation(*key)

    # -- what is read

    async def _read_facts(self) -> None:
        """All that stands there comes first: without them a conversation would be under another policy."""
        await asyncio.to_thread(self._reader.wait_until_caught_up, CAUGHT_UP_S)
        await self._mark_and_wait()

    async def _mark_and_wait(self) -> None:
        """Until all that the reader has read by now is folded."""
        self._folded.clear()
        self._reader.call(lambda: self._queue.put([RawMessage("", 0, 0, 0, None, None, REACHED)]))
        await self._folded.wait()

    async def _feed(self) -> None:
        while True:
            for message in await self._queue.get():
                if message.headers is REACHED and not message.topic:
                    self._folded.set()
                    continue
                await self._fold(message)
            self._on_change()

    async def _fold(self, message: RawMessage) -> None:
        """One record. What cannot be decoded is left out; for a registry that is away it waits."""
        while True:
            try:
                self._apply(message)
            except RegistryUnavailable as error:
                self.waits_for = error.message
                await asyncio.sleep(REGISTRY_AGAIN_S)
            except DecodeError as error:
                logger.warning(
                    "summarizer.undecodable topic=%s offset=%d %s", message.topic, message.offset, error.code
                )
                return
            else:
                return

    def _apply(self, message: RawMessage) -> None:
        if message.topic == self._kafka.names.conversation_facts:
            self._apply_facts(message)
            return
        found = self._kafka.names.parse_conversation(message.topic)
        if found is None:
            return
        key = Key(*found)
        if message.headers is REACHED:
            self._do(self._desk.reached(key, message.offset))
            return
        value = message.value
        told = None if value is None else self._codecs.prompt.decode(value, ConversationMessage)
        self._do(self._desk.record(key, message.offset, told))

    def _apply_facts(self, message: RawMessage) -> None:
        if message.value is None:
            if message.key is not None:
                self._desk.set_facts(Key(*conversation_of_key(message.key.decode(errors="replace"))), None)
            return
        facts = self._codecs.prompt.decode(message.value, ConversationFacts)
        self._desk.set_facts(Key(facts.tenant, facts.conversation_id), facts)

    def _do(self, effect: Commit | ReadWhole | None) -> None:
        if isinstance(effect, Commit):
            self._commits[effect.key] = effect
        elif effect is not None:
            self._whole.put_nowait(effect.key)

    async def _mark_forever(self) -> None:
        """Behind a topic's last record there may be offsets that hold none: nobody would tell of them."""
        while True:
            await asyncio.sleep(UNREAD_S)
            if self._reader.failure is not None:
                raise InternalError(f"conversations cannot be read any more: {self._reader.failure!r}")
            if unread := {(self._topic(key), 0) for key in self._desk.unread}:
                self._reader.call(partial(self._mark, unread))

    def _mark(self, unread: set[tuple[str, int]]) -> None:
        """On the reader's thread, between two batches."""
        marks = [
            RawMessage(tp[0], 0, position, 0, None, None, REACHED)
            for tp, position in self._reader.positions().items()
            if tp in unread
        ]
        if marks:
            self._queue.put(marks)

    # -- which topics there are

    async def _look_forever(self) -> None:
        while True:
            await self._patiently(self._look)
            await asyncio.sleep(self._look_s)

    async def _look(self) -> None:
        """Begin to follow what is to be, and forget what is gone, or to be followed no more."""
        counts = await asyncio.to_thread(admin.partition_counts, self._kafka)
        there = {Key(*found) for topic in counts if (found := self._kafka.names.parse_conversation(topic)) is not None}
        wanted = {key for key in there if self._desk.wants(key)}
        for key in self._desk.followed.keys() - wanted:
            self.forget(key)
        new = sorted(wanted - self._desk.followed.keys())
        for start in range(0, len(new), BEGUN_AT_ONCE):
            await self._begin(new[start : start + BEGUN_AT_ONCE])

    async def _begin(self, keys: Sequence[Key]) -> None:
        topics = {self._topic(key): key for key in keys}
        try:
            places = await asyncio.to_thread(self._places, list(topics))
        except NotFound:
            return  # one was deleted just now: the next look finds the others
        for topic, place in places.items():
            key = topics[topic]
            self._topic_ids[key] = place.topic_id
            self._desk.follow(key, place.topic_id, place.committed, place.end, place.base)
        begin = {(topic, 0): max(place.begin, place.committed) for topic, place in places.items()}

        def seek() -> None:
            for tp, offset in begin.items():
                self._reader.seek(tp, offset)

        self._reader.call(seek)

    def _places(self, topics: Sequence[str]) -> dict[str, Place]:
        """On a thread. Raises NotFound, BrokerUnavailable."""
        topic_ids = admin.topic_ids(self._kafka, topics)
        partitions = [(topic, 0) for topic in topic_ids]
        begin = admin.begin_offsets(self._kafka, partitions)
        committed = self._progress.read(topic_ids) if topic_ids else {}
        end = admin.end_offsets(self._kafka, partitions)  # last: what is below it is read before anything is due
        places: dict[str, Place] = {}
        for topic, topic_id in topic_ids.items():
            offset, base = committed.get(topic, (0, 0))
            if offset > end[topic, 0]:  # the log has lost its end
                offset, base = 0, 0
            places[topic] = Place(topic_id, begin[topic, 0], offset, base, end[topic, 0])
        return places

    # -- after something was erased

    async def _read_whole_forever(self) -> None:
        while True:
            key = await self._whole.get()
            await self._patiently(partial(self._read_whole, key))
            self._on_change()

    async def _read_whole(self, key: Key) -> None:
        if key not in self._desk.followed:
            return
        try:
            found, end = await asyncio.to_thread(self._standing, key)
        except NotFound:
            self.forget(key)
            return
        told = ((turn.offset, turn.message) for turn in found)
        self._do(self._desk.read_whole(key, told, end))

    def _standing(self, key: Key) -> tuple[list[Turn], int]:
        """On a thread: what stands in the topic, and its end."""
        end = admin.end_offsets(self._kafka, [(self._topic(key), 0)])[self._topic(key), 0]
        try:
            return standing(read_conversation(self._kafka, *key, codec=self._codecs.blocking, deadline_s=WHOLE_S)), end
        except NotFound:  # it is deleted, and its topic stays for its forks
            return [], end

    # -- what need not be read again

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_S)
            await self._patiently(self.commit)

    async def commit(self) -> None:
        """Commit what is due. Raises BrokerUnavailable."""
        due = dict(self._commits)
        if not due:
            return
        offsets = {self._topic(key): (self._topic_ids[key], one.offset, one.base) for key, one in due.items()}
        await asyncio.to_thread(self._progress.commit, offsets)
        for key, one in due.items():
            if self._commits.get(key) == one:
                del self._commits[key]
