"""Turns of conversations (DESIGN §3): read to the end, own input once at the grant, answer once, the winner counts.

`read` looks and writes nothing, so that a turn can be prepared before it is granted. `begin` writes the turn's own
input and says whether the log in front of it is still what `read` saw. Reading runs in a small pool of threads; the
event loop only awaits. Calls for one conversation run one after the other.

A Kafka that is away is waited for, in short attempts that the broker watch wakes, as long as the work is ours.

A conversation may be deleted at any time, and a topic of the same name made again (`docs/decisions/0040`). What a turn
writes belongs into the topic with one Kafka id: nothing of it stays in another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

from penstock.common.forks import fork_id_of
from penstock.common.threads import DaemonThreads
from penstock.processors.conversations.cache import LogCache
from penstock.processors.conversations.log import ConversationLog, HistoryMark, SummaryMark, covers
from penstock.processors.conversations.messages import Shown, as_chat, input_messages
from penstock.processors.earlier_messages import EarlierMessages, Summary, whole_turns
from penstock.processors.kafka.broker_watch import BrokerWatch
from penstock.schemas.codec import Codec
from penstock.schemas.errors import (
    BrokerUnavailable,
    Conflict,
    DecodeError,
    Forbidden,
    NotFound,
    Overloaded,
    RegistryUnavailable,
    StoreUnavailable,
    conversation_deleted,
)
from penstock.schemas.records import ArtifactRef, ConversationMessage, InferenceRequest, conversation_message_key

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
"""While something is waited for: how often to look whether the work is still ours."""

FIRST_ATTEMPT_S = 1.0
LONGEST_ATTEMPT_S = 15.0

T = TypeVar("T")
TopicRecord = tuple[int, bytes, bytes | None]
"""(offset, key, value)"""


class LostOwnership(Exception):
    """The request's partition went to another worker: nothing more may be written for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStart:
    """What the log says before the turn: the answer that stands already, or the history in front of its own input."""

    answer: ConversationMessage | None
    past: EarlierMessages
    mark: HistoryMark
    pictured: list[ConversationMessage] = field(default_factory=list[ConversationMessage])
    """The history as its records, if there are images in it; else nothing."""
    shown: Shown = field(default_factory=dict[int, Sequence[ArtifactRef]])
    """The images of its own input, where that is there already: an earlier attempt wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToSumUp:
    """What a summary is to be made of: `past`, up to the record at `through`."""

    past: EarlierMessages
    through: int
    mark: SummaryMark
    standing: ConversationMessage | None
    """The summary that the request has added already."""


class TurnLog(Protocol):
    """Reading and appending one conversation: Kafka in the worker, a list in tests.

    Who hears nothing from Kafka for `timeout_s` raises BrokerUnavailable.
    """

    @property
    def is_shared(self) -> bool:
        """Whether what is appended to a conversation that is gone is in a topic all the same."""
        ...

    def find(self, topic: str, timeout_s: float) -> str | None:
        """Kafka's id of the topic; None when there is none. Blocks."""
        ...

    def open(self, topic: str, timeout_s: float) -> str:
        """Make sure that the compacted topic exists; Kafka's id of it. Blocks."""
        ...

    def read(self, topic: str, from_offset: int, timeout_s: float) -> list[TopicRecord]:
        """Records from an offset to the end that the topic has now. Blocks."""
        ...

    async def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        """Append and wait for the broker; the offsets. Raises PenstockError."""
        ...


class ImageHolder(Protocol):
    """Keeps images for as long as turns refer to them; see `HeldImages`. Its methods block."""

    def hold(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None: ...
    def let_go(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None: ...
    def keep_only(self, tenant: str, conversation_id: str, artifact_ids: Set[str], erased: str) -> None: ...


class ConversationTurns:
    """Conversation turns for one worker; at most one per conversation is granted at a time (the scheduler's lines)."""

    def __init__(
        self,
        log: TurnLog,
        codec: Codec,
        topic_of: Callable[[str, str], str],
        *,
        threads: int,
        cached_bytes: int,
        watch: BrokerWatch,
        catch_up: Callable[[float], None] = lambda within_s: None,
        held: ImageHolder | None = None,
        store_threads: DaemonThreads | None = None,
        after_append: Callable[[], None] = lambda: None,
    ) -> None:
        """`held`: what keeps the images of turns; None where no turn has any. `store_threads` are for its calls.

        `catch_up` returns when this worker has carried out all commands that Kafka holds now: afterwards `mine` is
        false for the turns of a deleted conversation. It blocks and raises BrokerUnavailable after the given seconds.
        """
        self._log = log
        self._held = held
        self._store_threads = store_threads or DaemonThreads()
        self._codec = codec
        self._topic_of = topic_of
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="turns")
        self._cache = LogCache(cached_bytes)
        self._cache_lock = threading.Lock()
        self._order: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._watch = watch
        self._catch_up = catch_up
        self._after_append = after_append
        self._appends: dict[asyncio.Future[list[int]], str] = {}
        """What is being appended to which topic, also for work that was lost or cancelled meanwhile."""
        self._finishing: dict[str, list[ConversationMessage]] = {}
        """By topic, the answers whose images are held, and that are in the log a moment later."""
        self.missing_rights: dict[str, str] = {}
        """By topic, the right that its turns wait for."""
        self._closed = False

    async def read(self, request: InferenceRequest, mine: Callable[[], bool]) -> TurnStart:
        """The answer or the history, as the log has them now. Writes nothing and makes no topic."""
        topic = self._topic(request)
        return await self._patiently(
            topic, mine, lambda within_s: self._run(lambda: self._turn_start(topic, request.request_id, within_s))
        )

    async def to_sum_up(
        self, request: InferenceRequest, conversation_id: str, through: int | None, mine: Callable[[], bool]
    ) -> ToSumUp | None:
        """The conversation up to an offset (None: as it is now), only read; None when it holds nothing there.

        A request that adds to the conversation goes on from the last summary, which stands for what it covers.
        """
        topic = self._topic_of(request.tenant, conversation_id)
        adds = request.request_id if request.conversation_id is not None else None
        read = partial(self._to_sum_up, topic, adds, through)
        return await self._patiently(topic, mine, lambda within_s: self._run(lambda: read(within_s)))

    async def summary(self, request: InferenceRequest, mine: Callable[[], bool]) -> ConversationMessage | None:
        """The summary that the request has added already."""
        topic, request_id = self._topic(request), request.request_id
        log = await self._patiently(topic, mine, lambda within_s: self._run(lambda: self._refreshed(topic, within_s)))
        return log.summary_by(request_id)

    async def add_summary(
        self, summary: ConversationMessage, mine: Callable[[], bool], made_of: SummaryMark
    ) -> ConversationMessage:
        """Append a summary, unless its request has added one; the one that counts.

        Raises Cancelled when the topic was deleted, Conflict when something of what it was made of was erased,
        LostOwnership.
        """
        topic, request_id = self._topic_of(summary.tenant, summary.conversation_id), summary.request_id or ""

        async def attempt(within_s: float) -> ConversationMessage:
            log = await self._current(topic, made_of.topic_id, request_id, within_s)
            if log is None:
                raise conversation_deleted()
            if (standing := log.summary_by(request_id)) is not None:
                return standing
            if log.has(made_of):
                await self._append(topic, log, [summary], mine)
                self._after_append()
                if log.has(made_of):  # an append may have waited for Kafka
                    return log.summary_by(request_id) or summary
                await self._log.append(topic, [(key, None) for key in log.keys_of(request_id)])
            raise Conflict("something of the conversation was erased while it was summed up")

        return await self._patiently(topic, mine, attempt)

    async def begin(
        self,
        request: InferenceRequest,
        epoch: int,
        now_ms: int,
        mine: Callable[[], bool],
        mark: HistoryMark,
        shown: Shown | None = None,
    ) -> str | None:
        """At the grant: append the request's own input unless it is there, with the images that it shows.

        Returns the log's identity. None when the log in front of it is not what `read` saw (or the answer stands
        there by now): the turn must be read and prepared again. Raises LostOwnership.
        """
        topic, request_id = self._topic(request), request.request_id

        async def attempt(within_s: float) -> str | None:
            log = await self._current(topic, mark.topic_id, request_id, within_s)
            if log is None:
                return None
            log = await self._writable(topic, log, within_s, mine)
            if not _is_open(log, mark, request_id):
                return None
            own = log.inputs(request_id)
            messages = input_messages(request, epoch, now_ms, shown)
            missing = [message for message in messages if message.index not in own]
            if missing:
                await self._hold(missing)
                await self._append(topic, log, missing, mine)
            # An append that waited for Kafka, in a worker that others took for gone, may come after their answer.
            return log.identity if _is_open(log, mark, request_id) else None

        return await self._patiently(topic, mine, attempt)

    async def answer(self, request: InferenceRequest, mine: Callable[[], bool]) -> ConversationMessage | None:
        """The answer that stands already, appending nothing and making no topic."""
        return (await self.read(request, mine)).answer

    async def appended(self, request: InferenceRequest, mine: Callable[[], bool]) -> list[int] | None:
        """The offsets of the request's own input, in order; None while some of it is missing. Writes nothing."""
        topic, count = self._topic(request), len(input_messages(request, 0, 0))
        log = await self._patiently(topic, mine, lambda within_s: self._run(lambda: self._refreshed(topic, within_s)))
        own = log.inputs(request.request_id)
        return [own[index] for index in range(count)] if len(own) == count else None

    async def finish(self, answer: ConversationMessage, mine: Callable[[], bool], topic_id: str) -> ConversationMessage:
        """Append the answer unless one is there, and return the one that counts. Raises LostOwnership.

        `topic_id` is what `begin` returned. Raises Cancelled when that topic was deleted; StoreUnavailable before
        anything was appended.
        """
        topic = self._topic_of(answer.tenant, answer.conversation_id)
        request_id = answer.request_id or ""

        tried = False

        async def attempt(within_s: float) -> ConversationMessage:
            nonlocal tried
            # After a failure the log is read to its end, where what was appended without an answer is found.
            log = None if tried else self._cached(topic)
            tried = True
            if log is None or log.identity != topic_id:
                log = await self._current(topic, topic_id, request_id, within_s)
            if log is None:
                await self._let_go(answer, {artifact.artifact_id for artifact in answer.artifacts})
                raise conversation_deleted()
            if log.answer(request_id) is None:
                await self._append(topic, log, [answer], mine)
                self._after_append()
            if answer.artifacts:
                await self._let_go(answer, {artifact.artifact_id for artifact in answer.artifacts} - log.artifact_ids())
            return log.answer(request_id) or answer

        under_way = self._finishing.setdefault(topic, [])
        under_way.append(answer)
        try:
            await self._hold([answer])
            return await self._patiently(topic, mine, attempt)
        finally:
            under_way.remove(answer)
            if not under_way:
                self._finishing.pop(topic, None)

    async def erase(self, tenant: str, conversation_id: str, request_id: str) -> int:
        """Write tombstones for all of a request's messages; how many. Images that only they referred to are let go.

        A fork inherits the gap. Its summaries that tell of the messages go before them, so that an erasure that is cut
        off finds them again; and once more afterwards, for one that was added meanwhile.
        """
        topic = self._topic_of(tenant, conversation_id)
        async with self._in_order(topic):
            if sent := [one for one, where in self._appends.items() if where == topic]:
                await asyncio.wait(sent, timeout=LONGEST_ATTEMPT_S)  # of work that was cancelled or lost
            log = await self._run(lambda: self._refreshed(topic, LONGEST_ATTEMPT_S))
            keys, first = log.keys_of(request_id), log.first_of(request_id)
            if first is not None:
                await self._forget_in_forks(tenant, log, first)
            if keys:
                await self._log.append(topic, [(key, None) for key in (*_void(log), *keys)])
            if first is not None:
                log = await self._run(lambda: self._refreshed(topic, LONGEST_ATTEMPT_S))
                await self._forget_in_forks(tenant, log, first)
            if (held := self._held) is not None:
                left = log.artifact_ids(without=request_id) | self._about_to_stand(topic, request_id)
                await self._store_threads.run(held.keep_only, tenant, conversation_id, left, request_id)
            return len(keys)

    def _about_to_stand(self, topic: str, without: str) -> set[str]:
        """The images of answers that wait for the conversation's lock, but for those of one request."""
        answers = (one for one in self._finishing.get(topic, ()) if one.request_id != without)
        return {artifact.artifact_id for one in answers for artifact in one.artifacts}

    async def _forget_in_forks(self, tenant: str, log: ConversationLog, offset: int) -> None:
        """Erase the summaries of forks that tell of the message at an offset.

        Called with the log's lock. Locks are taken from parents to forks only.
        """
        for key, fork in log.topic.forks.items():
            if not log.topic.is_seen(offset, fork.through):
                continue
            topic = self._topic_of(tenant, fork.conversation_id)
            async with self._in_order(topic):
                forked = await self._run(partial(self._refreshed, topic, LONGEST_ATTEMPT_S))
                if fork_id_of(forked.topic.fork_key or "") != fork_id_of(key):
                    continue
                if keys := forked.summaries_of_message(offset):
                    await self._log.append(topic, [(key, None) for key in (*_void(forked), *keys)])
                await self._forget_in_forks(tenant, forked, offset)

    def close(self) -> None:
        """Let all who wait go, with LostOwnership."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _topic(self, request: InferenceRequest) -> str:
        return self._topic_of(request.tenant, request.conversation_id or "")

    async def _hold(self, messages: Sequence[ConversationMessage]) -> None:
        """Hold their images, before they are written: what is in a conversation must not be swept."""
        held, first = self._held, messages[0]
        ids = [artifact.artifact_id for message in messages for artifact in message.artifacts]
        if ids and held is not None:
            await self._store_threads.run(held.hold, first.tenant, first.conversation_id, ids)

    async def _let_go(self, answer: ConversationMessage, artifact_ids: Set[str]) -> None:
        """Nobody refers to these images of an answer."""
        held = self._held
        if artifact_ids and held is not None:
            await self._store_threads.run(held.let_go, answer.tenant, answer.conversation_id, artifact_ids)

    async def _current(
        self, topic: str, topic_id: str | None, request_id: str, within_s: float
    ) -> ConversationLog | None:
        """The log to its end, if it has the identity that the turn has seen; it had seen none when `topic_id` is None.

        None when the conversation was deleted. What of the turn came into the one that was begun since is taken back.
        """
        log = await self._run(lambda: self._refreshed(topic, within_s))
        if topic_id is None or log.identity == topic_id:
            return log
        if keys := log.keys_of(request_id):
            await self._log.append(topic, [(key, None) for key in keys])
        return None

    async def _writable(
        self, topic: str, log: ConversationLog, within_s: float, mine: Callable[[], bool]
    ) -> ConversationLog:
        """The log of a topic that exists and that the turn may write to. Raises LostOwnership.

        A deletion is commanded before the topic goes. So a worker that sees a topic, or that there is none, and then
        catches up with the commands, knows which turns were sent before the deletion.
        """
        while not log.may_be_written:
            seen = log.topic_id
            await self._run(lambda: self._catch_up(within_s))
            if not mine():
                raise LostOwnership
            log = await self._run(partial(self._opened, topic, log, within_s))
            log.may_be_written = log.topic_id == seen
        return log

    def _in_order(self, topic: str) -> asyncio.Lock:
        """One call at a time works on a conversation's log; the lock lives as long as somebody holds or awaits it."""
        lock = self._order.get(topic)
        if lock is None:
            lock = self._order[topic] = asyncio.Lock()
        return lock

    async def _patiently(self, topic: str, mine: Callable[[], bool], attempt: Callable[[float], Awaitable[T]]) -> T:
        """Attempts until one gets through; between two, wait for Kafka. Raises LostOwnership.

        An attempt is short, so that one that was begun while Kafka was away holds nobody up when it is back. A Kafka
        that is there and slow is given longer from attempt to attempt.
        """
        within_s = FIRST_ATTEMPT_S
        while not self._closed and mine():
            if self._watch.away:  # the threads are for those who may be answered
                await self._watch.wait(LOOK_AGAIN_S)
                within_s = FIRST_ATTEMPT_S
                continue
            missing = self.missing_rights.pop(topic, None)
            try:
                async with self._in_order(topic):
                    outcome = await attempt(within_s)
            except Forbidden as error:  # of Kafka: an operator grants it
                if missing is None:
                    logger.error("turns.missing_right topic=%s error=%s", topic, error)
                self.missing_rights[topic] = error.message
                await asyncio.sleep(LOOK_AGAIN_S)
            except (BrokerUnavailable, NotFound, Overloaded, StoreUnavailable) as error:
                # A broker that has started again may not know a topic yet.
                logger.info("turns.waits topic=%s error=%s", topic, error)
                within_s = min(2 * within_s, LONGEST_ATTEMPT_S)
                await self._watch.wait(LOOK_AGAIN_S)
            except RegistryUnavailable as error:
                logger.warning("turns.wait_for_registry topic=%s error=%s", topic, error)
                await asyncio.sleep(LOOK_AGAIN_S)
            else:
                self._watch.answered()
                return outcome
        raise LostOwnership

    async def _run(self, work: Callable[[], T]) -> T:
        """What `work` returns, in a thread of the pool. Raises LostOwnership once the turns are closed."""
        if self._closed:
            raise LostOwnership
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})  # the conversation's lock is held until the thread has left its log
            if not running.cancelled():
                running.exception()  # nobody else hears of it
            raise

    async def _append(
        self, topic: str, log: ConversationLog, messages: list[ConversationMessage], mine: Callable[[], bool]
    ) -> None:
        """Append and bring the log to its end. What another worker wrote in between is read too.

        Raises NotFound when the topic is not that of the log any more, or the conversation was deleted.
        """
        if not mine():
            raise LostOwnership
        records = [(conversation_message_key(message).encode(), self._codec.encode(message)) for message in messages]
        identity = log.identity
        offsets = await self._appended(topic, log.topic_id, records, mine)
        # A fork looks once more what was erased where it goes on from.
        if log.fork is None and offsets == list(range(log.next_offset, log.next_offset + len(offsets))):
            for offset, (key, value), message in zip(offsets, records, messages, strict=True):
                log.apply(offset, key, message, len(value))
            self._remember(topic, log)
        else:
            await self._run(lambda: self._extend(topic, log, LONGEST_ATTEMPT_S))
        if log.identity != identity:
            await self._log.append(topic, [(key, None) for key, _ in records])
            raise NotFound(f"the conversation of {topic} was deleted")

    async def _appended(
        self,
        topic: str,
        topic_id: str | None,
        records: Sequence[tuple[bytes, bytes | None]],
        mine: Callable[[], bool],
    ) -> list[int]:
        """The offsets. What was sent cannot be called back: work that is lost meanwhile leaves it to the broker."""
        appending = asyncio.ensure_future(self._append_to(topic, topic_id, records))
        self._appends[appending] = topic
        appending.add_done_callback(self._appended_or_not)
        while not appending.done():
            await asyncio.wait({appending}, timeout=LOOK_AGAIN_S)
            if not appending.done() and (self._closed or not mine()):
                raise LostOwnership
        return appending.result()

    async def _append_to(
        self, topic: str, topic_id: str | None, records: Sequence[tuple[bytes, bytes | None]]
    ) -> list[int]:
        """Append to the topic with this id. Producers name topics only: what came into another is taken back.

        Raises NotFound then.
        """
        offsets = await self._log.append(topic, records)
        found = await self._run(lambda: self._log.find(topic, LONGEST_ATTEMPT_S))
        if found == topic_id:
            return offsets
        if found is not None or self._log.is_shared:
            await self._log.append(topic, [(key, None) for key, _ in records])
        raise NotFound(f"{topic} was deleted")

    def _appended_or_not(self, appending: asyncio.Future[list[int]]) -> None:
        self._appends.pop(appending, None)
        if not appending.cancelled():
            appending.exception()  # perhaps nobody else hears of it

    # -- in the pool's threads

    def _turn_start(self, topic: str, request_id: str, within_s: float) -> TurnStart:
        log = self._refreshed(topic, within_s)
        answer = log.answer(request_id)
        return TurnStart(
            answer=answer,
            past=_past(log, request_id, [] if answer is not None else log.history(request_id)),
            mark=log.mark(request_id),
            pictured=[] if answer is not None else log.pictured(request_id),
            shown=log.shown_by(request_id),
        )

    def _to_sum_up(self, topic: str, adds: str | None, through: int | None, within_s: float) -> ToSumUp | None:
        """`adds`: the request that adds its summary, if one does."""
        log = self._refreshed(topic, within_s)
        found = log.through(through)
        if not found:
            return None
        last, standing, summary = found[-1].offset, None, None
        if adds is not None:
            standing = log.summary_by(adds)
            if (before := log.summary_below(last)) is not None:
                found = log.through(last, after=covers(before))
                summary = Summary(text=before.message.content, through=covers(before), turns=0)
        past = EarlierMessages(messages=[as_chat(entry.message) for entry in found], summary=summary)
        return ToSumUp(past=past, through=last, mark=log.summary_mark(last), standing=standing)

    def _refreshed(self, topic: str, within_s: float) -> ConversationLog:
        """The topic to its end: the cached part, if it is of the same Kafka topic, and the unseen tail."""
        return self._log_of(topic, self._log.find(topic, within_s), within_s)

    def _opened(self, topic: str, log: ConversationLog, within_s: float) -> ConversationLog:
        """The log of the topic that exists now; it is made if there is none."""
        topic_id = self._log.open(topic, within_s)
        return log if log.topic_id == topic_id else self._log_of(topic, topic_id, within_s)

    def _log_of(self, topic: str, topic_id: str | None, within_s: float) -> ConversationLog:
        if topic_id is None:
            return ConversationLog(None)
        log = self._cached(topic)
        if log is None or log.topic_id != topic_id:
            log = ConversationLog(topic_id)
        self._extend(topic, log, within_s)
        return log

    def _extend(self, topic: str, log: ConversationLog, within_s: float) -> None:
        self._read_into(topic, log, within_s)
        self._read_parent(log, within_s)
        self._remember(topic, log)

    def _read_parent(self, log: ConversationLog, within_s: float) -> None:
        """Read what is new where a fork goes on from. It inherits nothing if others deleted that topic."""
        fork = log.fork
        if fork is None:
            return
        limit = fork.through if log.limit is None else min(fork.through, log.limit)
        topic = self._topic_of(log.topic.tenant, fork.conversation_id)
        found, parent = self._log.find(topic, within_s), log.parent
        if found is not None:
            known = (one for one in (parent, log.refused_parent) if one is not None and one.topic_id == found)
            parent = next(known, None) or ConversationLog(found, limit)
            self._read_into(topic, parent, within_s)
        if parent is not None and found is not None and (found == fork.topic_id or parent.has_fork(log)):
            self._read_parent(parent, within_s)
        else:
            logger.warning("turns.no_parent topic=%s topic_id=%s", topic, fork.topic_id)
            log.refused_parent = None if found is None else parent
            parent = ConversationLog(None, limit)
        log.inherit(parent)

    def _read_into(self, topic: str, log: ConversationLog, within_s: float) -> None:
        for offset, key, value in self._log.read(topic, log.next_offset, within_s):
            if value is None:
                log.apply(offset, key, None)
                continue
            if not (log.is_within(offset) or key.startswith(b"forked/")):
                log.skip(offset)
                continue
            try:
                message = self._codec.decode(value, ConversationMessage)
            except DecodeError as error:
                logger.warning("turns.undecodable topic=%s offset=%d error=%s", topic, offset, error.code)
                log.skip(offset)
            else:
                log.apply(offset, key, message, len(value))

    def _cached(self, topic: str) -> ConversationLog | None:
        with self._cache_lock:
            return self._cache.get(topic)

    def _remember(self, topic: str, log: ConversationLog) -> None:
        with self._cache_lock:
            self._cache.put(topic, log)


def _void(log: ConversationLog) -> list[bytes]:
    """What has to go before a record is erased. See `TopicForks`."""
    return [key.encode() for key in sorted(log.topic.void)]


def _past(log: ConversationLog, request_id: str, messages: list[dict[str, Any]]) -> EarlierMessages:
    told = log.summary_for(request_id)
    if told is None:
        return EarlierMessages(messages=messages, chars=log.chars)
    turns = whole_turns(messages, log.covered_by(told, request_id))
    summary = Summary(text=told.message.content, through=covers(told), turns=turns)
    return EarlierMessages(messages=messages, summary=summary, chars=log.chars)


def _is_open(log: ConversationLog, mark: HistoryMark, request_id: str) -> bool:
    """Whether no answer of the request stands, and what is before it is what was read."""
    return log.answer(request_id) is None and log.agrees(mark, request_id)
