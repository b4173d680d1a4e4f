"""The one thread that does everything with the group's consumer: polls, hands over, commits, answers rebalances.

confluent_kafka lets one call at a time into a consumer, so beside a thread that polls any other call would starve.
What the thread fetches waits in a `FetchBuffer`; only a few batches at a time are handed to the event loop, so that
more urgent records pass what waits. A partition that holds enough is paused inside librdkafka, never to keep records
back: `hold` only leaves them in the buffer.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.common.kafka_errors import client_logger, missing_right
from penstock.common.lost_brokers import LostBrokers, let_go
from penstock.common.read_rights import ReadRights
from penstock.common.reader import message_headers
from penstock.processors.kafka.batches import TP, Batch, Committed, DeliveredRecord
from penstock.processors.kafka.commits import CommitQueue
from penstock.processors.kafka.fetch_buffer import FetchBuffer
from penstock.processors.kafka.lost_logs import Extent, LostLogs, extents
from penstock.processors.kafka.offsets import (
    as_partitions,
    commit_now,
    commit_results,
    committed_or_start,
    group_identity,
)

logger = logging.getLogger(__name__)

FETCH_RECORDS = 500
HANDED_BATCHES = 2
POLL_S = 0.02
IDLE_POLL_S = 0.2
IDLE_AFTER_S = 1.0
"""Without a record and without a call for so long, the thread looks for calls less often: a poll cannot be woken."""
BUSY_WAIT_S = 0.005
WAKE_S = 0.5
STALLED_S = 0.05
ANSWER_S = 60.0
REFUSALS_S = 1.0
"""From the first refused position until they are mended: a broker that lost one log has often lost others, and a lost
log that grows again can only be recognised while this consumer remembers what it has read."""

_PARTITION_EOF = KafkaError._PARTITION_EOF  # pyright: ignore[reportPrivateUsage]
_POSITION_REFUSED = KafkaError._AUTO_OFFSET_RESET  # pyright: ignore[reportPrivateUsage]
_OF_ONE_PARTITION = frozenset(
    (
        KafkaError.OFFSET_METADATA_TOO_LARGE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    )
)


class GroupEvents(Protocol):
    """What the thread calls on the event loop. It waits for the coroutines: the rebalance goes on after them."""

    async def assigned(
        self, generation: int, member_id: str, committed: Mapping[TP, Committed], *, begins_again: bool
    ) -> None: ...
    async def revoked(self, *, lost: bool) -> Mapping[TP, Committed]:
        """Returns what should be committed before the partitions go; ignored when they are lost already."""
        ...

    def handed_over(self, batch: Batch) -> None: ...


class PollThread:
    """Owns the consumer. `subscribe`, `commit`, `hold` and `stop` may be called from any thread."""

    def __init__(
        self,
        config: Mapping[str, Any],
        loop: asyncio.AbstractEventLoop,
        events: GroupEvents,
        *,
        urgency: Callable[[str], int],
        lost_logs: LostLogs,
        lost_brokers: LostBrokers,
        rights: ReadRights,
        stall: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = loop
        self._events = events
        self._stall = stall
        self._lost_logs = lost_logs
        self._lost_brokers = lost_brokers
        self._rights = rights
        self._buffer = FetchBuffer(urgency)
        self._commits = CommitQueue()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._wake = threading.Event()
        self._held: frozenset[TP] = frozenset()
        self._paused: frozenset[TP] = frozenset()
        self._refused: set[TP] = set()
        """Partitions whose logs do not hold the position that was fetched from; librdkafka fetches them no more."""
        self._mend_at = 0.0
        self._room = threading.Semaphore(HANDED_BATCHES)
        self._generation = -1
        self._sent_at = 0.0
        self._active_at = 0.0
        """When there was a record or a call."""
        self.owned: frozenset[TP] = frozenset()
        self.failure: BaseException | None = None
        self.trouble: str | None = None
        """Why it has no assignment, as far as Kafka said so."""
        self._fatal: KafkaError | None = None
        self._config = {**config, "on_commit": self._on_commit, "error_cb": self._on_error}
        self._group_id = str(config["group.id"])
        self._topics: list[str] = []
        self._lost = False
        """The consumer has lost the cluster, and is to be replaced."""
        self._kafka = self._new_consumer()
        self._thread = threading.Thread(target=self._run, name="group consumer", daemon=True)

    # -- from any thread

    def subscribe(self, topics: Sequence[str]) -> None:
        def subscribe() -> None:
            self._topics = list(topics)
            self._subscribe()

        self._calls.put(subscribe)
        if self._thread.ident is None:
            self._thread.start()

    def commit(
        self, generation: int, offsets: Mapping[TP, Committed], answered: Callable[[dict[TP, bool]], None]
    ) -> None:
        """Commit for this generation. `answered` is called in the poll thread; later generations answer False."""

        def commit() -> None:
            if generation == self._generation:
                self._commits.ask(offsets, answered)
            else:
                answered(dict.fromkeys(offsets, False))

        self._calls.put(commit)

    def hold(self, tps: frozenset[TP]) -> None:
        """Hand over nothing of exactly these partitions from now on."""
        self._held = tps
        self._wake.set()

    def stop(self) -> None:
        """Commit what waits, leave the group, end. Blocks; may be called twice."""
        self._ending.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        else:
            self._kafka.close()

    # -- in the thread

    def _new_consumer(self) -> Consumer:
        return Consumer(self._config, logger=client_logger)

    def _replace_consumer(self) -> None:
        if self._generation >= 0:  # a member without partitions gets no call when it ceases to be one
            self._wait_for(self._events.revoked(lost=True))
        old, self._kafka, self._lost = self._kafka, self._new_consumer(), False
        self._begin({})
        self._subscribe()
        let_go(old)

    def _subscribe(self) -> None:
        self._kafka.subscribe(self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                if self._fatal is not None:
                    raise KafkaException(self._fatal)
                self._serve_calls()
                if self._lost or self._lost_brokers.replaces(self._kafka, busy=bool(self.owned)):
                    self._replace_consumer()
                if self.owned and self._stall():
                    self._ending.wait(STALLED_S)
                    continue
                self._fetch()
                if self._refused and time.monotonic() >= self._mend_at:
                    self._mend_positions()
                self._hand_over()
                self._send_commits()
                self._apply_pauses()
        except BaseException as error:
            logger.exception("group.thread_failed")
            self.failure = error
        self._finish()

    def _finish(self) -> None:
        self._ending.set()
        try:
            self._serve_calls()
            self._commit_all({})
            self._kafka.close()
        except Exception as error:
            logger.warning("group.leave_failed error=%r", error)
        self._commits.begin({})
        self._serve_calls()

    def _serve_calls(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            self._active_at = time.monotonic()
            call()

    def _fetch(self) -> None:
        """Wait a moment for records, for less when there is something else to do, and take what is there."""
        now = time.monotonic()
        wait_s = POLL_S if now - self._active_at < IDLE_AFTER_S else IDLE_POLL_S
        if self._buffer.has_any(self._held):
            self._wake.clear()
            if self._room_left():
                wait_s = 0.0
            else:
                self._wake.wait(BUSY_WAIT_S)
                wait_s = 0.0
        elif not self._buffer.empty:
            wait_s = BUSY_WAIT_S
        try:
            first = self._kafka.poll(wait_s)  # consume(n, t) would wait for n records or for t
            if first is None:
                return
            self._active_at = time.monotonic()
            generation = self._generation
            messages = [first, *self._kafka.consume(FETCH_RECORDS - 1, 0)]
        except KafkaException as error:
            logger.warning("group.poll_failed error=%s", error)
            self._ending.wait(STALLED_S)
            return
        if generation != self._generation:
            # A rebalance came in between, and these may be of either assignment. They are fetched again.
            self._fetch_from_buffer_ends()
            return
        for message in messages:
            self._take_message(message)

    def _fetch_from_buffer_ends(self) -> None:
        ends = self._buffer.ends().items()
        self._kafka.assign([TopicPartition(*tp, offset) for tp, offset in ends if tp not in self._refused])

    def _room_left(self) -> bool:
        if self._room.acquire(blocking=False):
            self._room.release()
            return True
        return False

    def _take_message(self, message: Message) -> None:
        error = message.error()
        tp = (message.topic() or "", message.partition() or 0)
        if error is None:
            headers, readable = message_headers(message)
            self._buffer.add(
                tp,
                DeliveredRecord(
                    message.offset() or 0, message.timestamp()[1], message.key(), message.value(), headers, readable
                ),
            )
        elif error.code() == _PARTITION_EOF:
            self._buffer.reached_end(tp, message.offset() or 0)
        elif error.code() == _POSITION_REFUSED:
            logger.info("group.position_refused topic=%s partition=%d error=%s", *tp, error)
            if not self._refused:
                self._mend_at = time.monotonic() + REFUSALS_S
            self._refused.add(tp)
            self._lost_logs.position_refused(tp, self._commits.known.get(tp))
        elif self._rights.note(error, message.topic()):
            pass  # it is fetched again by librdkafka, and named meanwhile
        elif (missing := missing_right(error, self._group_id, message.topic())) is not None:
            self._in_trouble(missing)
        else:
            logger.warning("group.fetch_error topic=%s partition=%s error=%s", *tp, error)

    def _hand_over(self) -> None:
        while self._room.acquire(blocking=False):
            piece = self._buffer.take(self._held)
            if piece is None:
                self._room.release()
                return
            tp, start, end, records = piece
            batch = Batch(tp, start, end, self._generation, records, self._room_back(self._room))
            self._loop.call_soon_threadsafe(self._events.handed_over, batch)

    def _room_back(self, room: threading.Semaphore) -> Callable[[], None]:
        def back() -> None:
            room.release()
            self._wake.set()

        return back

    def _apply_pauses(self) -> None:
        wanted = self._buffer.pauses(self._paused)
        if wanted == self._paused:
            return
        pause, resume = wanted - self._paused, self._paused - wanted
        if pause:
            self._kafka.pause([TopicPartition(*tp) for tp in pause])
        if resume:
            self._kafka.resume([TopicPartition(*tp) for tp in resume])
            if self._paused == self.owned:
                self._wake_fetching(resume)
        self._paused = wanted

    def _wake_fetching(self, tps: frozenset[TP]) -> None:
        """A broker's thread that has nothing to fetch sleeps for up to a second; a request wakes it."""
        try:
            self._kafka.offsets_for_times([TopicPartition(*tp, OFFSET_END) for tp in tps], WAKE_S)
        except KafkaException:
            pass

    # -- logs that do not hold a position

    def _mend_positions(self) -> None:
        """Go on behind records that were deleted unread; begin again where a log has lost its end."""
        positions = {tp: end for tp, end in self._buffer.ends().items() if tp in self._refused}
        found = extents(self._kafka, list(positions))
        if found.keys() != positions.keys():
            self._ending.wait(STALLED_S)
            return  # a leader has not answered: it is asked again
        self._refused.clear()
        # A log may have grown since it was cut: then it holds the position, and other records up to it.
        cut = {tp: extent for tp, extent in found.items() if positions[tp] >= extent.first}
        if cut:
            self._join_again(cut)
            return
        for tp, extent in found.items():
            self._lost_logs.records_deleted(tp, positions[tp], extent.first)
            self._buffer.reached_end(tp, extent.first)
        self._fetch_from_buffer_ends()

    def _join_again(self, cut: Mapping[TP, Extent]) -> None:
        """Commit where these logs begin again, then leave the group and join it.

        Work on offsets that mean other records now must end, and what is still on the log runs again. A run under the
        same generation and attempt would give readers two versions of one attempt, so there must be a new generation.
        """
        self._commit_what_is_done(without=cut)
        committed = {tp: self._commits.known[tp] for tp in cut}
        self._begin({})
        self._lost_logs.begin_again(self._kafka, committed, cut, self._wait)
        self._kafka.close()
        self._kafka, self._lost = self._new_consumer(), False
        self._subscribe()

    def _send_commits(self) -> None:
        unanswered = self._commits.sent
        if unanswered is not None and time.monotonic() - self._sent_at > ANSWER_S:
            logger.warning("group.commit_unanswered partitions=%d", len(unanswered.offsets))
            self._commits.answer(unanswered, {})
        sent = self._commits.next()
        if sent is None:
            return
        self._sent_at = time.monotonic()
        try:
            self._kafka.commit(offsets=as_partitions(sent.offsets), asynchronous=True)
        except KafkaException as error:
            logger.info("group.commit_failed error=%s", error)
            self._commits.answer(sent, {})

    def _on_commit(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        if threading.current_thread() is not self._thread:
            return  # of a consumer that was replaced
        # Matched by content: a callback can be lost, and that of a commit that timed out can come late.
        sent = self._commits.sent
        offsets = {(p.topic, p.partition): (p.offset, p.metadata or "") for p in partitions}
        if sent is not None and sent.offsets == offsets:
            one_by_one = error is not None and error.code() in _OF_ONE_PARTITION
            self._commits.answer(sent, commit_results(sent.offsets, error, partitions), one_by_one=one_by_one)
        if error is not None:
            logger.info("group.commit_failed error=%s", error)

    def _commit_what_is_done(self, without: Collection[TP] = ()) -> None:
        """Before partitions go, commit what the event loop knows to be done."""
        more = self._wait_for(self._events.revoked(lost=False)) or {}
        self._serve_calls()
        self._commit_all({tp: offset for tp, offset in more.items() if tp not in without})

    def _commit_all(self, more: Mapping[TP, Committed]) -> None:
        """Inside a rebalance no callback comes, so wait for the answer."""
        if more:
            self._commits.ask(more, lambda _: None)
        offsets = self._commits.all_open()
        if offsets:
            results, error = commit_now(self._kafka, offsets)
            if error is not None:
                logger.info("group.commit_failed error=%s: the work is done again elsewhere, seen once", error)
            self._commits.answer_all(results)

    def _in_trouble(self, reason: str) -> None:
        if reason != self.trouble:
            logger.warning("group.waits group=%s reason=%s", self._group_id, reason)
        self.trouble = reason

    def _wait(self, seconds: float, reason: str) -> bool:
        """Wait before the broker is asked again; True when this thread ends, or its client has lost the cluster."""
        self._in_trouble(reason)
        if self._ending.wait(seconds):
            return True
        self._lost = self._lost_brokers.replaces(self._kafka)
        return self._lost

    # -- rebalances, inside poll

    def _on_assign(self, kafka: Any, partitions: Sequence[TopicPartition]) -> None:
        if kafka is not self._kafka:
            return  # it was replaced, and is closed in another thread
        try:
            self._assign(kafka, partitions)
        except KafkaException as error:  # taken for a failed poll, this member would own partitions and fetch nothing
            raise RuntimeError("the assignment could not be taken up") from error

    def _assign(self, kafka: Any, partitions: Sequence[TopicPartition]) -> None:
        tps = [(p.topic, p.partition) for p in partitions]
        known = committed_or_start(kafka, tps, self._wait)
        generation, member_id = group_identity(kafka)
        committed = None if known is None else self._lost_logs.at_assignment(kafka, known, self._wait)
        if committed is None:
            kafka.assign([])
            return
        self.trouble = None
        self._begin(committed)
        self._refused |= self._lost_logs.unmended(committed)
        self._mend_at = time.monotonic()
        kafka.assign([TopicPartition(*tp, offset) for tp, (offset, _) in committed.items() if tp not in self._refused])
        self._generation = generation
        self._wait_for(self._events.assigned(generation, member_id, committed, begins_again=committed is not known))

    def _on_revoke(self, kafka: Any, partitions: Sequence[TopicPartition]) -> None:
        if kafka is not self._kafka:
            return
        self._commit_what_is_done()
        self._begin({})

    def _on_lost(self, kafka: Any, partitions: Sequence[TopicPartition]) -> None:
        if kafka is not self._kafka:
            return
        logger.warning("group.lost partitions=%d: others may work on them", len(partitions))
        self._wait_for(self._events.revoked(lost=True))
        self._begin({})

    def _begin(self, committed: Mapping[TP, Committed]) -> None:
        for tp, end in self._buffer.ends().items():
            self._lost_logs.has_read(tp, end, self._commits.possible(tp))
        self._buffer.assign({tp: offset for tp, (offset, _) in committed.items()})
        self._commits.begin(committed)
        self._paused = frozenset()
        self._refused.clear()
        self._room = threading.Semaphore(HANDED_BATCHES)
        self._generation = -1
        self.owned = frozenset(committed)

    def _wait_for(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Let the loop do its part; while it stops there is none."""
        if self._ending.is_set():
            coroutine.close()
            return None
        done = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while not self._ending.is_set():
            try:
                return done.result(POLL_S)
            except TimeoutError:
                if done.done():
                    raise
        done.cancel()
        return None

    def _on_error(self, error: KafkaError) -> None:
        client_logger.info("group.client_error error=%s", error)  # each of its threads says the same, 40 times a second
        if error.fatal() and threading.current_thread() is self._thread:
            self._fatal = error
