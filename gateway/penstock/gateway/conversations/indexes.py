"""The indexes of conversations that a gateway keeps: built on demand, extended to the topic's end, within a bound."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from penstock.common.conversations import ConversationRecord, decoded
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import first_offset, is_shared
from penstock.gateway.conversations import tails
from penstock.gateway.conversations.index import MESSAGES, ConversationIndex, HeadRecord, Said, ranges
from penstock.gateway.conversations.tails import TopicEnd
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, DecodeError, NotFound
from penstock.schemas.records import ConversationMessage

logger = logging.getLogger(__name__)

MOST_RECORDS = 100_000
"""Limit for all indexes together, about 500 bytes per record. One above half of it holds tombstones alone."""
INDEX_WEIGHT = 10
"""What an empty index counts for, in records."""
READ_AT_ONCE = 2_000
GAP = 100
"""Offsets of a page that are at most this far apart are read in one go."""
TOPICS_AT_ONCE = 500
TOGETHER_RECORDS = 20_000
"""Of many topics so many records are read in one go, about."""
TRIES = 3
MOST_CAREFUL = 10_000


class Log(tails.Log, Protocol):
    """Topics of one partition. All methods block, and raise BrokerUnavailable."""

    def topic_id(self, topic: str) -> str | None:
        """Kafka's id of the topic, another one after it was made anew; None when it does not exist."""
        ...

    def end(self, topic: str) -> int:
        """The offset of its next record. Raises NotFound."""
        ...

    def newest_times(self, topics: Sequence[str]) -> dict[str, int]:
        """By topic that holds records: when its newest one was written, in ms since the epoch. Raises NotFound."""
        ...

    def read_many(self, spans: Mapping[str, tuple[int, int]], give_up: float) -> list[RawMessage]:
        """As `read`, of several topics. No span is empty."""
        ...

    def batches(self, topic: str, begin: int, end: int, give_up: float, most: int) -> Iterator[Sequence[RawMessage]]:
        """As `read`, `most` records at a time. Only the last batch has fewer, and may have none."""
        ...

    def last_records(self, topics: Sequence[str], give_up: float) -> dict[str, RawMessage | None]:
        """By topic that holds records: the last one; None where compaction removed it. Unknown ones are left out."""
        ...


@dataclass(eq=False, slots=True)
class Indexed:
    """A conversation's index. Hold the lock to extend or query it."""

    topic_id: str
    index: ConversationIndex = field(init=False)
    weight: int = 0
    """Its part of `Indexes._weight`."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_careful: bool = False
    """Records are decoded whole: one that has a head and does not decode behind it counts for nothing."""
    was_asked: bool = False
    """A page was made of the newest records alone, so the next call indexes the topic."""

    def __post_init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        self.index = ConversationIndex(topic_id=self.topic_id)


class Indexes:
    """All methods block and are thread-safe. They raise NotFound for a topic that does not exist, BrokerUnavailable,
    RegistryUnavailable."""

    def __init__(self, log: Log, codec: Codec, most_records: int) -> None:
        self._log = log
        self._codec = codec
        self._head = codec.head(ConversationMessage, "request_id", "direction", "index")
        self._most_records = most_records
        self._indexes: OrderedDict[str, Indexed] = OrderedDict()
        self._weight = 0
        self._guard = threading.Lock()
        self._careful: set[str] = set()
        """Kafka's ids of topics whose logs did not hold what an index said."""
        self.records_read = 0
        """Records that were read from topics since the start."""

    def __len__(self) -> int:
        """The weight of the kept indexes, in records."""
        return self._weight

    @contextmanager
    def indexed(self, topic: str) -> Generator[Indexed]:
        """The index of the current topic, locked. Its new size is counted at the end."""
        topic_id = self._log.topic_id(topic)
        if topic_id is None:
            with self._guard:
                self._drop(topic)
            raise NotFound(f"{topic} does not exist")
        with self._locked(topic, topic_id) as found:
            yield found

    def together(self, topics: Sequence[str], give_up: float) -> Iterator[tuple[str, Indexed]]:
        """Those of the topics that exist, each indexed to its end and locked while it is handed out.

        Many are read by a few calls, and no more than a few stand in memory for it.
        """
        for start in range(0, len(topics), TOPICS_AT_ONCE):
            left = list(self._places(topics[start : start + TOPICS_AT_ONCE]).items())
            while left:
                spans, some = dict[str, tuple[int, int]](), list[tuple[str, TopicEnd]]()
                while left and sum(end - begin for begin, end in spans.values()) < TOGETHER_RECORDS:
                    topic, place = left.pop(0)
                    some.append((topic, place))
                    if (begin := self._indexed_end(topic, place)) < place.end <= begin + READ_AT_ONCE:
                        spans[topic] = begin, place.end
                raw = self._read_spans(spans, give_up)
                for topic, place in some:
                    with suppress(NotFound), self._locked(topic, place.topic_id) as found:
                        if topic in raw and found.index.end == spans[topic][0]:  # else another call has extended it
                            found.index.extend(self._heads(found, raw[topic]), spans[topic][1])
                        if found.index.end != place.end:
                            self.extend(topic, found, give_up)
                        yield topic, self.whole(topic, found, give_up)

    def _places(self, topics: Sequence[str]) -> dict[str, TopicEnd]:
        for _ in range(TRIES):
            with suppress(NotFound):  # one was deleted since: look which are left
                return self._log.places(topics)
        raise BrokerUnavailable("conversations are deleted while they are read; try again", retry_after_s=1)

    def _indexed_end(self, topic: str, place: TopicEnd) -> int:
        with self._guard:
            indexed = self._indexes.get(topic)
        if indexed is not None and indexed.topic_id == place.topic_id:
            return indexed.index.end
        return first_offset(place.topic_id)

    def _read_spans(self, spans: Mapping[str, tuple[int, int]], give_up: float) -> dict[str, list[RawMessage]]:
        """By topic; none if one of them was deleted meanwhile."""
        found: dict[str, list[RawMessage]] = {}
        with suppress(NotFound):
            raw = self._log.read_many(spans, give_up) if spans else []
            self._count_read(len(raw))
            found = {topic: [] for topic in spans}
            for one in raw:
                found[one.topic].append(one)
        return found

    def extend(self, topic: str, indexed: Indexed, give_up: float, *, first_only: bool = False) -> None:
        """Index what was added since the last call; with `first_only` stop at the first record.

        If a read fails, the next call resumes after the last successful one.
        """
        end = self._log.end(topic)
        if end < indexed.index.end:  # the log was truncated: indexed offsets can hold other records now
            indexed.begin_anew()
        index = indexed.index
        while first_only and index.end < end and index.created_ms is None:
            raw = self._read(topic, index.end, end, give_up, 1)
            index.extend(self._heads(indexed, raw), raw[-1].offset + 1 if raw else end)
        if first_only or index.end >= end:
            return
        for some in self._log.batches(topic, index.end, end, give_up, READ_AT_ONCE):
            self._count_read(len(some))
            index.extend(self._heads(indexed, some), some[-1].offset + 1 if len(some) == READ_AT_ONCE else end)
        if index.is_thin and index.forks.deletions:  # which records stand behind one is more than it knows
            indexed.begin_anew()
            self.extend(topic, indexed, give_up)

    def whole(self, topic: str, indexed: Indexed, give_up: float) -> Indexed:
        """With an index of all records, for this call alone where that is not kept. The lock must be held."""
        made = Indexed(indexed.topic_id, lock=indexed.lock, is_careful=indexed.is_careful)
        if indexed.index.is_thin:
            self.extend(topic, made, give_up)
        else:
            made.index = indexed.index
        return made

    def window(self, topic: str, indexed: Indexed, begin: int, end: int, give_up: float) -> ConversationIndex:
        """An index of a part of the topic, as far as its index knows the tombstones behind that."""
        records = self._heads(indexed, self._read(topic, begin, end, give_up))
        return indexed.index.window(records, begin, end)

    def read_all(self, topic: str, begin: int, end: int, give_up: float) -> list[ConversationRecord]:
        """The records from `begin` to before `end`, whole."""
        return list(decoded(self._codec, self._read(topic, begin, end, give_up)))

    def _heads(
        self, indexed: Indexed, raw: Iterable[RawMessage]
    ) -> Iterable[ConversationRecord] | Iterable[HeadRecord]:
        """The records as an index wants them: to decode them whole takes ten times as long."""
        return decoded(self._codec, raw) if indexed.is_careful else self._read_heads(raw)

    def _read_heads(self, raw: Iterable[RawMessage]) -> Iterator[HeadRecord]:
        read_head = self._head
        for item in raw:
            said: Said | ConversationMessage | None = None
            if item.value is not None:
                try:
                    request_id, direction, index, _ = read_head(item.value)
                    said = Said(request_id, direction, index)
                    if direction not in MESSAGES:
                        said = self._codec.decode(item.value, ConversationMessage)
                except DecodeError as error:
                    logger.warning(
                        "conversation.undecodable topic=%s offset=%d %s", item.topic, item.offset, error.code
                    )
                    continue
            yield HeadRecord(item.offset, item.timestamp_ms, (item.key or b"").decode("utf-8", "replace"), said)

    def read(self, topic: str, offsets: Sequence[int], give_up: float) -> list[ConversationRecord]:
        """The records at these offsets, as far as they are there."""
        wanted = frozenset(offsets)
        raw = itertools.chain.from_iterable(self._read(topic, *one, give_up) for one in ranges(offsets, GAP))
        return list(decoded(self._codec, (one for one in raw if one.offset in wanted)))

    def forget(self, topic: str, indexed: Indexed) -> None:
        """The log does not hold what this index says: read it once more, carefully."""
        with self._guard:
            if self._indexes.get(topic) is indexed:
                self._drop(topic)
            if len(self._careful) >= MOST_CAREFUL:
                self._careful.clear()
            self._careful.add(indexed.topic_id)

    def _read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        found = self._log.read(topic, begin, end, give_up, most)
        self._count_read(len(found))
        return found

    def _count_read(self, records: int) -> None:
        with self._guard:
            self.records_read += records

    # -- which are kept

    @contextmanager
    def _locked(self, topic: str, topic_id: str) -> Generator[Indexed]:
        with self._guard:
            indexed = self._indexes.get(topic)
            if indexed is None or indexed.topic_id != topic_id:
                self._drop(topic)
                indexed = self._indexes[topic] = Indexed(topic_id, is_careful=topic_id in self._careful)
        with indexed.lock:
            try:
                yield indexed
            finally:
                self._count(topic, indexed)

    def _count(self, topic: str, indexed: Indexed) -> None:
        """Count its size, mark it as most recently used, and drop indexes above the limit."""
        with self._guard:
            if self._indexes.get(topic) is not indexed:
                return
            self._weight -= indexed.weight
            indexed.weight = len(indexed.index) + INDEX_WEIGHT
            self._weight += indexed.weight
            self._indexes.move_to_end(topic)
            if indexed.weight > self._most_records / 2:
                self._make_light(topic, indexed)
            while self._weight > self._most_records:
                self._drop(next(iter(self._indexes)))

    def _make_light(self, topic: str, indexed: Indexed) -> None:
        """Keep little of a conversation that would push all others out. Called with the guard."""
        # In the shared topic a window of offsets may hold none of its records, and all of them are read at once.
        if indexed.index.forks.deletions or indexed.index.is_thin or is_shared(indexed.topic_id):
            self._drop(topic)
            return
        indexed.index = indexed.index.thin()
        self._weight -= indexed.weight
        indexed.weight = len(indexed.index) + INDEX_WEIGHT
        self._weight += indexed.weight

    def _drop(self, topic: str) -> None:
        """Called with the guard."""
        indexed = self._indexes.pop(topic, None)
        if indexed is not None:
            self._weight -= indexed.weight
            indexed.weight = 0
