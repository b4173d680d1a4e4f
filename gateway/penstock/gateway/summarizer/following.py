"""Feeds a desk: the facts of conversations, and the topics of those that are to be summed up by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from penstock.common import admin
from penstock.common.reader import BatchQueue, PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.starting import Starting
from penstock.gateway.summarizer.sources import REACHED, Source
from penstock.gateway.summarizer.summary_scheduler import Commit, Key, ReadWhole, Submit, SummaryScheduler
from penstock.schemas.errors import DecodeError, InternalError, NotFound, PenstockError, RegistryUnavailable
from penstock.schemas.records import ConversationFacts, ConversationMessage
from penstock.schemas.registry import Codecs
from penstock.schemas.topics import conversation_of_key

logger = logging.getLogger(__name__)

AGAIN_S, REGISTRY_AGAIN_S, COMMIT_S, UNREAD_S = 1.0, 0.1, 1.0, 0.5
CAUGHT_UP_S = 120.0
MOST_FAILURES = 3
"""Of conversations one after the other, until the broker is taken to be away."""
BEGUN_AT_ONCE = 200
"""Conversations whose reading begins in one go."""
COMPARED_AT_ONCE = 500
"""Conversations of which each look asks whether they are still the same."""
MakeSource = Callable[[PartitionReader, Callable[[Sequence[RawMessage]], None]], Source]
T = TypeVar("T")


class Following:
    """On one event loop. `on_change` is called when something may be due."""

    def __init__(
        self,
        kafka: KafkaSettings,
        codecs: Codecs,
        scheduler: SummaryScheduler,
        make_source: MakeSource,
        look_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self._kafka = kafka
        self._codecs = codecs
        self._scheduler = scheduler
        self._look_s = look_s
        self._on_change = on_change
        self._queue = BatchQueue(asyncio.get_running_loop())
        facts = kafka.names.conversation_facts
        self._reader = PartitionReader(kafka, [facts], self._queue.put, fetch_wait_ms=500, name="penstock-summarizer")
        self._make_source = make_source
        self._source: Source | None = None
        self._folded = asyncio.Event()
        self._whole: asyncio.Queue[Key] = asyncio.Queue()
        self._topic_ids: dict[Key, str] = {}
        self._to_compare: list[Key] = []
        """Conversations that are followed, whose ids are still to be compared."""
        self._commits: dict[Key, Commit] = {}
        self._generations: dict[Key, int] = {}
        """By conversation, how often its reading began: marks of an earlier one tell nothing."""
        self._waits: dict[str, str] = {"start": Starting("starting")}
        """By what waits, for what."""

    @property
    def waits_for(self) -> str | None:
        """Why not all is followed now."""
        return next(iter(self._waits.values()), None) or self._reader.rights.reason

    async def run(self) -> None:
        """Until it is cancelled. Raises InternalError when only a new process can go on."""
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._feed())
                await self._patiently("start", lambda: asyncio.to_thread(self._start))
                await self._patiently("start", self._read_facts)
                logger.info("summarizer.started")
                for part in (self._look_forever, self._read_whole_forever, self._commit_forever, self._mark_forever):
                    parts.create_task(part())
        finally:
            self._queue.close()
            await asyncio.to_thread(self._reader.stop)
            if self._source is not None:
                await asyncio.to_thread(self._source.stop)

    def forget(self, key: Key) -> None:
        """Its topic is gone or another one; the next look finds out."""
        self._scheduler.forget(key)
        self._topic_ids.pop(key, None)
        self._commits.pop(key, None)
        self.source.forget(key)

    async def _patiently(self, part: str, work: Callable[[], Awaitable[T]]) -> T:
        """Do it, again until Kafka and the registry let it be done. `part` names who waits."""
        while True:
            try:
                found = await work()
            except InternalError:
                raise
            except PenstockError as error:
                self._wait(part, error)
                await asyncio.sleep(AGAIN_S)
            else:
                self._waits.pop(part, None)
                return found

    def _wait(self, part: str, error: PenstockError) -> None:
        if self._waits.get(part) != error.message:
            logger.warning("summarizer.waits for=%s error=%s reason=%s", part, error.code, error.message)
        self._waits[part] = error.message

    @property
    def source(self) -> Source:
        """What it reads from, once it has begun."""
        assert self._source is not None, "nothing is followed before that"
        return self._source

    def _start(self) -> None:
        """On a thread. Raises BrokerUnavailable, which names the brokers that were asked, and NotFound."""
        admin.partition_counts(self._kafka)
        if self._source is None:
            self._source = self._make_source(self._reader, self._queue.put)
        self._reader.start()

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
                self._wait("registry", error)
                await asyncio.sleep(REGISTRY_AGAIN_S)
            except DecodeError as error:
                logger.warning(
                    "summarizer.undecodable topic=%s offset=%d %s", message.topic, message.offset, error.code
                )
                return
            else:
                self._waits.pop("registry", None)
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
            if message.timestamp_ms == self._generations.get(key):
                self._do(self._scheduler.reached(key, message.offset))
            return
        value = message.value
        told = None if value is None else self._codecs.prompt.decode(value, ConversationMessage)
        self._do(self._scheduler.record(key, message.offset, told))

    def _apply_facts(self, message: RawMessage) -> None:
        if message.value is None:
            if message.key is not None:
                self._scheduler.set_facts(Key(*conversation_of_key(message.key.decode(errors="replace"))), None)
            return
        facts = self._codecs.prompt.decode(message.value, ConversationFacts)
        self._scheduler.set_facts(Key(facts.tenant, facts.conversation_id), facts)

    def ended(self, submit: Submit, end: int, *, failed: bool) -> None:
        self._do(self._scheduler.ended(submit, end, failed=failed))

    def _do(self, effect: Commit | ReadWhole | None) -> None:
        if isinstance(effect, Commit):
            self._commits[effect.key] = effect
        elif effect is not None:
            self._whole.put_nowait(effect.key)

    async def _mark_forever(self) -> None:
        while True:
            await asyncio.sleep(UNREAD_S)
            if (failure := self._reader.failure or self.source.failure) is not None:
                raise InternalError(f"conversations cannot be read any more: {failure!r}")
            if unread := {key: self._generations[key] for key in self._scheduler.unread}:
                self.source.mark(unread)

    # -- which topics there are

    async def _look_forever(self) -> None:
        while True:
            await self._patiently("look", self._look)
            await asyncio.sleep(self._look_s)

    async def _look(self) -> None:
        """Begin to follow what is to be, and forget what is gone, or to be followed no more."""
        there = await asyncio.to_thread(self.source.there)
        wanted = {key for key in there if self._scheduler.wants(key)}
        for key in (self._scheduler.followed.keys() - wanted) | await self._replaced():
            self.forget(key)
        new = sorted(wanted - self._scheduler.followed.keys())
        for start in range(0, len(new), BEGUN_AT_ONCE):
            await self._begin(new[start : start + BEGUN_AT_ONCE])

    async def _replaced(self) -> set[Key]:
        """Of the conversations whose turn it is to be looked at those that are another one by now, or gone.

        One that is begun anew between two looks, with as many records as the former one, says nothing of it.
        """
        if not self._to_compare:
            self._to_compare = list(self._scheduler.followed)
        some, self._to_compare = self._to_compare[:COMPARED_AT_ONCE], self._to_compare[COMPARED_AT_ONCE:]
        ids = await asyncio.to_thread(self.source.ids, some) if some else {}
        return {key for key in some if key in self._scheduler.followed and ids.get(key) != self._topic_ids[key]}

    async def _begin(self, keys: Sequence[Key]) -> None:
        """Those that cannot be asked about are left to the next look. Raises BrokerUnavailable if none can."""
        try:
            await self._begin_together(keys)
        except PenstockError as error:
            failures = 0
            for key in keys:
                try:
                    await self._begin_together([key])
                except PenstockError as own:  # deleted just now, or without a leader
                    logger.info("summarizer.not_followed_yet error=%s reason=%s", own.code, own.message)
                    failures += not isinstance(own, NotFound)
                    if failures > MOST_FAILURES:
                        raise own from error

    async def _begin_together(self, keys: Sequence[Key]) -> None:
        places = await asyncio.to_thread(self.source.places, keys)
        for key, place in places.items():
            self._topic_ids[key] = place.topic_id
            self._generations[key] = self._generations.get(key, 0) + 1
            self._scheduler.follow(key, place.topic_id, place.committed, place.end)
        self.source.begin({key: max(place.begin, place.committed.offset) for key, place in places.items()})

    # -- after something was erased

    async def _read_whole_forever(self) -> None:
        while True:
            key = await self._whole.get()
            try:
                again = await self._read_whole(key)
            except PenstockError as error:
                logger.warning("summarizer.not_read error=%s reason=%s", error.code, error.message)
                again = True
            if again:  # behind all others
                await asyncio.sleep(AGAIN_S)
                self._whole.put_nowait(key)
            self._on_change()

    async def _read_whole(self, key: Key) -> bool:
        """Whether it must be read again. Raises BrokerUnavailable, RegistryUnavailable."""
        generation = self._generations.get(key)
        if key not in self._scheduler.followed:
            return False
        try:
            found, end = await asyncio.to_thread(self.source.standing, key, self._topic_ids[key])
        except NotFound:  # it is gone, or another one, which the next look finds
            self.forget(key)
            return False
        if generation != self._generations.get(key):
            return False
        effect = self._scheduler.read_whole(key, ((turn.offset, turn.message) for turn in found), end)
        if isinstance(effect, Commit):
            self._do(effect)
        return isinstance(effect, ReadWhole)

    # -- what need not be read again

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(COMMIT_S)
            await self._patiently("commit", self.commit)

    async def commit(self) -> None:
        """Commit what is due. Raises BrokerUnavailable."""
        due = dict(self._commits)
        if not due:
            return
        await asyncio.to_thread(self.source.commit, {key: (self._topic_ids[key], one) for key, one in due.items()})
        for key, one in due.items():
            if self._commits.get(key) == one:
                del self._commits[key]
