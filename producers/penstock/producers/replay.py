"""Reads many conversations of a tenant from Kafka, in batches, and keeps the position in a consumer group.

Partitions are read in windows by one consumer that assigns itself: each is that of a conversation's own topic, or all
are those of the topic that conversations share (`replay_records` says which records are shown). A group that subscribes
keeps the topics of its members in one record, and ten thousand of them can be more than a broker takes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Message

from penstock.common.conversations import decoded
from penstock.common.group_positions import GroupPositions, Kept
from penstock.common.kafka_errors import translated
from penstock.common.reader import RawMessage, make_consumer, read_with
from penstock.common.settings import KafkaSettings
from penstock.producers.replay_plan import (
    Pace,
    Piece,
    Range,
    ReplayedRecord,
    ReplayOptions,
    begin_at,
    check_kept,
    check_options,
    cut,
    next_window,
)
from penstock.producers.replay_records import PartitionRecords
from penstock.producers.replay_topics import ReplayTopics
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

BATCH_RECORDS = 100
WINDOW_RECORDS, WINDOW_PLACES = 1_000, 100
"""Of what is read at a time."""
LOOK_RECORDS = 5_000
"""Of what is looked through at a time: a partition that conversations share may be long, and its records large."""
FORGET_S = 12 * 3_600.0
"""What was looked at longer ago is looked at again: Kafka drops tombstones a day after it compacted what they erase."""
STALE_S = 10.0
"""What was read longer ago is read again: it may be erased by now."""
COMMIT_S = 1.0
LOOK_S = 1.0
"""Between two looks for new records. A look that takes long is followed by a longer pause."""
LIST_S = 10.0
"""Between two looks for new conversations."""


@dataclass(kw_only=True, slots=True)
class _Log:
    """A partition that is read."""

    topic_id: str
    position: int
    """Everything before was taken."""
    goal: int
    records: PartitionRecords
    looked_at: float
    taken: dict[str, int] = field(default_factory=dict[str, int])
    """By conversation: what was taken of it beyond the position, up to this offset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    place: TP
    piece: Piece


class ConversationReplay:
    """`step` gives a batch, `taken` says that the caller is done with it.

    Thread-safe: who gave up waiting for a `step` in another thread may call `close`, which waits for its end.

    All methods but `wait_s` block for Kafka's answers, each for at most `timeout_s`. They raise BrokerUnavailable,
    Forbidden, RegistryUnavailable, and Conflict when the group has members or keeps the positions of another replay.
    Making one raises InvalidRequest.
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
        self._logs: dict[TP, _Log] = {}
        self._behind: dict[TP, None] = {}
        """Those whose goal is not reached, in the order in which they are read."""
        self._met: set[str] = set()
        """Topics whose leaders the consumer knows."""
        self._batches: deque[_Batch] = deque()
        self._read_at = 0.0
        self._handed: _Batch | None = None
        self._uncommitted: set[TP] = set()
        self._committed_at = clock()
        self._listed_at: float | None = None
        self._look_at = 0.0

    def step(self) -> list[ReplayedRecord] | None:
        """The next batch, records of one conversation in order; empty when none is there yet; None at the end."""
        with self._lock:
            while (batch := self._next_batch()) is None:
                if self._behind:
                    if not self._read(self._window()):
                        return []
                    continue
                now = self._clock()
                if self._listed_at is None or (self._follows and now >= self._look_at):
                    self._look(now)
                if not self._behind:
                    self._commit()
                    return [] if self._follows else None
            self._handed = batch
            self._pace.count(len(batch.piece.records), self._clock())
            return batch.piece.records

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
        known = [(place, self._logs[place]) for place in self._uncommitted]
        self._group.keep_partitions(
            {place: Kept(offset=one.position, topic_id=one.topic_id, note=one.records.note) for place, one in known}
        )
        self._uncommitted.clear()

    def _next_batch(self) -> _Batch | None:
        if self._batches and self._clock() - self._read_at > STALE_S:
            self._batches.clear()
        while self._batches:
            batch = self._batches.popleft()
            if batch.piece.records:
                return batch
            self._pass(batch)  # nothing in it is to be seen
        return None

    def _pass(self, batch: _Batch) -> None:
        if (one := self._logs.get(batch.place)) is None:
            return
        one.position = batch.piece.through
        if records := batch.piece.records:
            one.taken[records[0].conversation_id] = records[-1].offset + 1
        one.taken = {name: through for name, through in one.taken.items() if through > one.position}
        self._uncommitted.add(batch.place)
        if one.position >= one.goal:
            self._behind.pop(batch.place, None)
            one.records.forget(one.position)

    def _window(self) -> dict[TP, Range]:
        known = self._logs
        behind = ((place, (known[place].position, known[place].goal)) for place in self._behind)
        return next_window(behind, self._window_records, WINDOW_PLACES)

    def _read(self, window: Mapping[TP, Range]) -> bool:
        """Fill `_batches` with what is to be seen of these ranges, unless a topic was replaced: then nothing.

        False: more has to be looked through first.
        """
        try:
            if not self._replaced(window):
                if not self._look_through(window):
                    return False
                self._batches.extend(self._batches_of(window))
        except (BrokerUnavailable, NotFound):
            if not self._replaced(window):
                raise
        return True

    def _look_through(self, places: Iterable[TP]) -> bool:
        """Look at the next part of what says which records of these partitions are to be seen. True: all is known."""
        ranges: dict[TP, Range] = {}
        for place in places:
            one = self._logs[place]
            if self._clock() - one.looked_at > FORGET_S:
                one.records.begin(one.position)
            one.looked_at = self._clock()
            if (unlooked := one.records.unlooked(one.goal)) is not None:
                ranges[place] = unlooked[0], min(unlooked[1], unlooked[0] + LOOK_RECORDS)
        self._look_at_ranges(ranges, time.monotonic() + self._timeout_s)
        return all(self._logs[place].records.unlooked(self._logs[place].goal) is None for place in ranges)

    def _look_at_ranges(self, ranges: Mapping[TP, Range], give_up: float) -> None:
        found = self._read_ranges(ranges, give_up, keep=self._matters)
        by_place = _by_place(ranges, found)
        for place, (_, through) in ranges.items():
            self._logs[place].records.look(by_place[place], through)

    def _matters(self, message: Any) -> bool:
        one = self._logs[message.topic(), message.partition()]
        return one.records.matters(message.key(), message.value())

    def _batches_of(self, window: Mapping[TP, Range]) -> list[_Batch]:
        give_up = time.monotonic() + self._timeout_s
        self._read_at = self._clock()
        ends = self._topics.ends(window)
        raw = _by_place(window, self._read_ranges(window, give_up))
        rest: dict[TP, Range] = {}
        for place, (_, through) in window.items():
            records = self._logs[place].records
            records.look(raw[place], through)
            if records.looked_to < ends.get(place, 0):
                rest[place] = records.looked_to, ends[place]
        self._look_at_ranges(rest, give_up)
        return [batch for place, (_, through) in window.items() for batch in self._cut(place, raw[place], through)]

    def _cut(self, place: TP, raw: Iterable[RawMessage], through: int) -> list[_Batch]:
        """The records that are to be seen, in batches; an empty one when there are none."""
        log = self._logs[place]
        shown: dict[str, list[RawMessage]] = {}
        for record in raw:
            if (found := log.records.shown(record)) and record.offset >= log.taken.get(found[0], 0):
                shown.setdefault(found[0], []).append(found[1])
        conversations = [self._replayed(name, records) for name, records in shown.items()]
        pieces = cut(conversations, self._batch_records, through)
        return [_Batch(place=place, piece=piece) for piece in pieces]

    def _replayed(self, conversation_id: str, records: Iterable[RawMessage]) -> list[ReplayedRecord]:
        return [
            ReplayedRecord(
                conversation_id=conversation_id,
                offset=record.offset,
                timestamp_ms=record.timestamp_ms,
                key=record.key,
                message=record.message,
            )
            for record in decoded(self._codec, records)
        ]

    def _read_ranges(
        self, ranges: Mapping[TP, Range], give_up: float, keep: Callable[[Message], bool] = lambda _: True
    ) -> list[RawMessage]:
        if not ranges:
            return []
        # Without this, the consumer looks up the leader of a topic that is new to it only after a second.
        topics = {topic for topic, _ in ranges}
        for topic in topics - self._met:
            with translated(f"read {topic}", topic):
                self._consumer.list_topics(topic, timeout=max(0.1, give_up - time.monotonic()))
        self._met |= topics
        found = read_with(self._consumer, ranges, give_up, keep=keep)
        self._consumer.unassign()
        return found

    # -- which partitions there are, and how far they go

    def _look(self, now: float) -> None:
        """Set new goals, and begin with what is new."""
        if self._listed_at is not None:
            for place, end in self._topics.ends(self._logs).items():
                one = self._logs[place]
                if end < one.goal:  # the log lost records, and others may be in their place
                    one.position, one.taken = one.position if one.position <= end else 0, {}
                    one.records.begin(one.position)
                one.goal = end
                if end == one.records.looked_to:  # nothing came since
                    one.looked_at = now
        if self._listed_at is None or now - self._listed_at >= LIST_S:
            self._list()
            self._listed_at = now
        self._behind = {place: None for place, one in self._logs.items() if one.position < one.goal}
        ended = self._clock()
        self._look_at = ended + max(LOOK_S, 10 * (ended - now))

    def _list(self) -> None:
        found = self._topics.list()
        if missing := self._logs.keys() - found.keys():
            self._replaced(missing)
        self._begin({place: records for place, records in found.items() if place not in self._logs})

    def _begin(self, found: Mapping[TP, PartitionRecords]) -> None:
        """Begin with these partitions. Raises Conflict when the group has positions of another replay in them."""
        since_ms, from_offset = self._options.get("since_ms"), self._options.get("from_offset")
        located = self._topics.locate(found, from_offset=from_offset, since_ms=since_ms)
        kept = {} if self._group is None else self._group.read_partitions(list(located))
        for place, one in kept.items():
            check_kept(one, located[place].topic_id, found[place].note, self._options.get("group") or "")
        for place, one in located.items():
            position = begin_at(kept.get(place), one.topic_id, one.start, one.bounds)
            found[place].begin(position)
            self._logs[place] = _Log(
                topic_id=one.topic_id,
                position=position,
                goal=one.bounds[1],
                records=found[place],
                looked_at=self._clock(),
            )
            # Committed also where nothing is new: positions of a group without members are dropped by their age.
            self._uncommitted.add(place)

    def _replaced(self, places: Iterable[TP]) -> bool:
        """Whether any of these is no more of the topic that it was. A replay that follows begins with the new one."""
        ids = self._topics.ids(places)
        gone = {place: one.records for place in places if ids.get(place) != (one := self._logs[place]).topic_id}
        for place in gone:
            self._forget(place)
        if self._follows:
            self._begin(gone)
            self._behind |= {place: None for place in gone if place in self._logs}
        return bool(gone)

    def _forget(self, place: TP) -> None:
        del self._logs[place]
        self._behind.pop(place, None)
        self._uncommitted.discard(place)
        self._met.discard(place[0])


def _by_place(places: Iterable[TP], records: Iterable[RawMessage]) -> dict[TP, list[RawMessage]]:
    found: dict[TP, list[RawMessage]] = {place: [] for place in places}
    for record in records:
        found[record.topic, record.partition].append(record)
    return found
