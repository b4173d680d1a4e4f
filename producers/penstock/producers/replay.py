"""Reads many conversations of a tenant from Kafka, in batches, and keeps the position in a consumer group.

Conversations are read in windows by one consumer that assigns itself. A group that subscribes keeps the topics of its
members in one record, and ten thousand of them can be more than a broker takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from confluent_kafka import Message

from penstock.common.conversations import ConversationRecord, decoded
from penstock.common.group_positions import GroupPositions, Kept
from penstock.common.kafka_errors import translated
from penstock.common.reader import RawMessage, make_consumer, read_with
from penstock.common.settings import KafkaSettings
from penstock.producers.replay_plan import (
    Erasures,
    Pace,
    Range,
    ReplayedRecord,
    ReplayOptions,
    begin_at,
    check_options,
    next_window,
)
from penstock.producers.replay_topics import ReplayTopics
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError

logger = logging.getLogger(__name__)

BATCH_RECORDS = 100
WINDOW_RECORDS, WINDOW_TOPICS = 1_000, 100
"""Of what is read at a time."""
STALE_S = 10.0
"""What was read longer ago is read again: it may be erased by now."""
COMMIT_S = 1.0
LOOK_S = 1.0
"""Between two looks for new records. A look that takes long is followed by a longer pause."""
LIST_S = 10.0
"""Between two looks for new conversations."""


@dataclass(kw_only=True, slots=True)
class _Conversation:
    id: str
    topic_id: str
    position: int
    """Everything before was taken."""
    goal: int
    erasures: Erasures = field(default_factory=Erasures)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    topic: str
    records: list[ReplayedRecord]
    through: int
    """The position once it is taken."""


class ConversationReplay:
    """`step` gives a batch, `taken` says that the caller is done with it.

    Thread-safe: who gave up waiting for a `step` in another thread may call `close`, which waits for its end.

    All methods but `wait_s` block for Kafka's answers, each for at most `timeout_s`. They raise BrokerUnavailable,
    Forbidden, RegistryUnavailable, and Conflict when the group has members. Making one raises InvalidRequest.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        topics: ReplayTopics,
        options: ReplayOptions,
        *,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_options(options)
        self._codec, self._topics, self._options = codec, topics, options
        self._timeout_s, self._clock = timeout_s, clock
        self._follows = options.get("follow", False)
        self._pace = Pace(options.get("rate"))
        self._batch_records = self._pace.most(options.get("batch_records", BATCH_RECORDS))
        self._window_records = max(self._batch_records, self._pace.most(WINDOW_RECORDS))
        group = options.get("group")
        self._consumer = make_consumer(settings, fetch_wait_ms=1, overrides={"group.id": group} if group else {})
        self._group = GroupPositions(group=group, consumer=self._consumer, timeout_s=timeout_s) if group else None
        self._lock = threading.Lock()
        self._conversations: dict[str, _Conversation] = {}
        """By topic."""
        self._behind: dict[str, None] = {}
        """Topics whose goal is not reached, in the order in which they are read."""
        self._met: set[str] = set()
        """Topics whose leaders the consumer knows."""
        self._batches: deque[_Batch] = deque()
        self._read_at = 0.0
        self._handed: _Batch | None = None
        self._uncommitted: set[str] = set()
        self._committed_at = clock()
        self._listed_at: float | None = None
        self._look_at = 0.0

    def step(self) -> list[ReplayedRecord] | None:
        """The next batch, records of one conversation in order; empty when none is there yet; None at the end."""
        with self._lock:
            while (batch := self._next_batch()) is None:
                if self._behind:
                    self._read(self._window())
                    continue
                now = self._clock()
                if self._listed_at is None or (self._follows and now >= self._look_at):
                    self._look(now)
                if not self._behind:
                    self._commit()
                    return [] if self._follows else None
            self._handed = batch
            self._pace.count(len(batch.records), self._clock())
            return batch.records

    def taken(self) -> None:
        """The batch that `step` gave is dealt with: it does not come again once its position is committed."""
        with self._lock:
            if self._handed is not None:
                self._pass(self._handed)
                self._handed = None
            if self._clock() - self._committed_at >= COMMIT_S:
                self._commit()

    def wait_s(self) -> float:
        """How long to wait before the next `step`, seconds."""
        now = self._clock()
        idle = self._look_at - now if self._follows and not self._batches and not self._behind else 0.0
        return max(self._pace.wait_s(now), idle, 0.0)

    def close(self) -> None:
        """Keep the positions, if the broker answers, and leave it."""
        with self._lock:
            try:
                self._commit()
            except PenstockError as error:  # what was taken since the last commit comes again
                logger.warning("replay.positions_not_kept error=%s", error.code)
            finally:
                self._consumer.close()

    def _commit(self) -> None:
        """Keep the positions behind all that was taken."""
        self._committed_at = self._clock()
        if self._group is None or not self._uncommitted:
            return
        known = [(topic, self._conversations[topic]) for topic in self._uncommitted]
        self._group.keep({topic: Kept(offset=one.position, topic_id=one.topic_id) for topic, one in known})
        self._uncommitted.clear()

    # -- batches

    def _next_batch(self) -> _Batch | None:
        if self._batches and self._clock() - self._read_at > STALE_S:
            self._batches.clear()
        while self._batches:
            batch = self._batches.popleft()
            if batch.records:
                return batch
            self._pass(batch)  # nothing in it is to be seen
        return None

    def _pass(self, batch: _Batch) -> None:
        if (one := self._conversations.get(batch.topic)) is None:
            return
        one.position = batch.through
        self._uncommitted.add(batch.topic)
        if one.position >= one.goal:
            self._behind.pop(batch.topic, None)
            one.erasures = Erasures()

    def _window(self) -> dict[str, Range]:
        known = self._conversations
        behind = ((topic, (known[topic].position, known[topic].goal)) for topic in self._behind)
        return next_window(behind, self._window_records, WINDOW_TOPICS)

    def _read(self, window: Mapping[str, Range]) -> None:
        """Fill `_batches` with what is to be seen of these ranges, unless a topic was replaced: then nothing."""
        try:
            if not self._replaced(window):
                self._batches.extend(self._batches_of(window))
        except (BrokerUnavailable, NotFound):
            if not self._replaced(window):
                raise

    def _batches_of(self, window: Mapping[str, Range]) -> list[_Batch]:
        give_up = time.monotonic() + self._timeout_s
        self._read_at = self._clock()
        ends = self._topics.ends(window)
        raw = self._read_ranges(window, give_up)
        rest = {
            topic: (max(through, self._conversations[topic].erasures.looked_to), ends.get(topic, 0))
            for topic, (_, through) in window.items()
        }
        rest = {topic: one for topic, one in rest.items() if one[0] < one[1]}
        later = self._read_ranges(rest, give_up, keep=lambda message: message.value() is None)
        by_topic: dict[str, list[RawMessage]] = {topic: [] for topic in window}
        for message in raw:
            by_topic[message.topic].append(message)
        for message in (*(one for one in raw if one.value is None), *later):
            erased = self._conversations[message.topic].erasures
            erased.add((message.key or b"").decode("utf-8", "replace"), message.offset)
        batches: list[_Batch] = []
        for topic, (_, through) in window.items():
            self._conversations[topic].erasures.looked_to = max(through, ends.get(topic, 0))
            batches += self._cut(topic, decoded(self._codec, by_topic[topic]), through)
        return batches

    def _cut(self, topic: str, records: Iterable[ConversationRecord], through: int) -> list[_Batch]:
        """The records that are to be seen, in batches; an empty one when there are none."""
        conversation = self._conversations[topic]
        seen = [
            ReplayedRecord(
                conversation_id=conversation.id,
                offset=record.offset,
                timestamp_ms=record.timestamp_ms,
                key=record.key,
                message=record.message,
            )
            for record in records
            if record.message is None or not conversation.erasures.erase(record)
        ]
        pieces = [seen[at : at + self._batch_records] for at in range(0, len(seen), self._batch_records)]
        batches = [_Batch(topic=topic, records=piece, through=piece[-1].offset + 1) for piece in pieces[:-1]]
        return [*batches, _Batch(topic=topic, records=pieces[-1] if pieces else [], through=through)]

    def _read_ranges(
        self, ranges: Mapping[str, Range], give_up: float, keep: Callable[[Message], bool] = lambda _: True
    ) -> list[RawMessage]:
        if not ranges:
            return []
        # Without this, the consumer looks up the leader of a topic that is new to it only after a second.
        for topic in ranges.keys() - self._met:
            with translated(f"read {topic}", topic):
                self._consumer.list_topics(topic, timeout=max(0.1, give_up - time.monotonic()))
        self._met |= ranges.keys()
        found = read_with(self._consumer, {(topic, 0): one for topic, one in ranges.items()}, give_up, keep=keep)
        self._consumer.unassign()
        return found

    # -- which conversations there are, and how far they go

    def _look(self, now: float) -> None:
        """Set new goals, and begin with conversations that are new."""
        if self._listed_at is not None:
            for topic, end in self._topics.ends(self._conversations).items():
                one = self._conversations[topic]
                # An end before the position: the log lost records, and others may stand in their place.
                one.goal, one.position = end, one.position if one.position <= end else 0
        if self._listed_at is None or now - self._listed_at >= LIST_S:
            self._list()
            self._listed_at = now
        self._behind = {topic: None for topic, one in self._conversations.items() if one.position < one.goal}
        ended = self._clock()
        self._look_at = ended + max(LOOK_S, 10 * (ended - now))

    def _list(self) -> None:
        found = self._topics.list()
        if missing := self._conversations.keys() - found.keys():
            self._replaced(missing)
        self._begin({topic: one for topic, one in found.items() if topic not in self._conversations})

    def _begin(self, found: Mapping[str, str]) -> None:
        """Begin with these conversations, ids by topic."""
        since_ms, from_offset = self._options.get("since_ms"), self._options.get("from_offset")
        located = self._topics.locate(found, from_offset=from_offset, since_ms=since_ms)
        kept = {} if self._group is None else self._group.read(list(located))
        for topic, place in located.items():
            position = begin_at(kept.get(topic), place.topic_id, place.start, place.bounds)
            self._conversations[topic] = _Conversation(
                id=found[topic], topic_id=place.topic_id, position=position, goal=place.bounds[1]
            )
            # Committed also where nothing is new: positions of a group without members are dropped by their age.
            self._uncommitted.add(topic)

    def _replaced(self, topics: Iterable[str]) -> bool:
        """Whether any of these is no more the topic that it was. Those begin anew, if they exist."""
        ids = self._topics.ids(topics)
        gone = {topic: one.id for topic in topics if ids.get(topic) != (one := self._conversations[topic]).topic_id}
        for topic in gone:
            self._forget(topic)
        self._begin(gone)
        self._behind |= {topic: None for topic in gone if topic in self._conversations}
        return bool(gone)

    def _forget(self, topic: str) -> None:
        del self._conversations[topic]
        self._behind.pop(topic, None)
        self._uncommitted.discard(topic)
        self._met.discard(topic)
