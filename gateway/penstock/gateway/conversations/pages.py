"""Pages of conversations, read by offset: the cost of a page does not depend on the length of the conversation."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.common.conversations import ConversationRecord, Turn, decoded
from penstock.common.reader import RawMessage
from penstock.gateway.conversations.index import ConversationIndex, ranges
from penstock.gateway.conversations.tails import Place, Tail
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, NotFound
from penstock.schemas.ids import check_conversation_id, check_tenant
from penstock.schemas.topics import TopicNames

MOST_RECORDS = 100_000
"""Limit for all indexes together, about 500 bytes per record. A conversation above half of it is not kept."""
INDEX_WEIGHT = 10
"""What an empty index counts for, in records."""
READ_AT_ONCE = 2_000
GAP = 100
"""Offsets of a page that are at most this far apart are read in one go."""
DEADLINE_S = 10.0
TRIES = 3


class Log(Protocol):
    """Topics of one partition. All methods block, and raise BrokerUnavailable."""

    def topic_id(self, topic: str) -> str | None:
        """Kafka's id of the topic, another one after it was made anew; None when it does not exist."""
        ...

    def end(self, topic: str) -> int:
        """The offset of its next record. Raises NotFound."""
        ...

    def places(self, topics: Sequence[str]) -> dict[str, Place]:
        """Those of the topics that exist. Raises NotFound for one that is deleted at this moment."""
        ...

    def read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        """The records from `begin` to before `end`, or the first `most` of them. Raises NotFound."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A conversation as it stands: its records end before `end`. `created_ms`: as `Conversations.created_ms`."""

    topic_id: str
    created_ms: int | None
    end: int
    messages: int
    """How many count."""
    summaries: int


@dataclass(eq=False, slots=True)
class _Indexed:
    """A conversation's index. Hold the lock to extend or query it."""

    topic_id: str
    index: ConversationIndex = field(default_factory=ConversationIndex)
    weight: int = 0
    """Its part of `Conversations._weight`."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Conversations:
    """All methods block and are thread-safe.

    Each call compares the topic's id and end with the index. So deletion and erasure take effect at once, whoever
    wrote them. Indexes are built on demand; the least recently used are dropped first.

    Every call raises InvalidRequest for an impossible id, NotFound for an unknown conversation, BrokerUnavailable,
    RegistryUnavailable.
    """

    def __init__(self, log: Log, names: TopicNames, codec: Codec, *, most_records: int = MOST_RECORDS) -> None:
        self._log = log
        self._names = names
        self._codec = codec
        self._most_records = most_records
        self._indexes: OrderedDict[str, _Indexed] = OrderedDict()
        self._weight = 0
        self._guard = threading.Lock()
        self.records_read = 0
        """Records that were read from topics since the start."""

    def __len__(self) -> int:
        """The weight of the kept indexes, in records."""
        return self._weight

    def created_ms(self, tenant: str, conversation_id: str) -> int | None:
        """The time of the first record; None if there is none. Reads only that record."""
        topic = self._topic(tenant, conversation_id)
        with self._indexed(topic, conversation_id) as indexed:
            if indexed.index.created_ms is None:
                self._extend(topic, conversation_id, indexed, time.monotonic() + DEADLINE_S, first_only=True)
            return indexed.index.created_ms

    def turns(
        self, tenant: str, conversation_id: str, limit: int, *, after: int | None = None, newest_first: bool = False
    ) -> list[Turn]:
        """The messages that count: the first `limit` in this order, after the one at the offset `after`."""
        found = self._page(
            tenant, conversation_id, lambda index: index.turns(limit, after=after, newest_first=newest_first)
        )
        turns = [Turn(offset=one.offset, message=one.message) for one, _ in found if one.message is not None]
        return turns[::-1] if newest_first else turns

    def outline(self, tenant: str, conversation_id: str) -> Outline:
        """What stands in it now."""
        topic = self._topic(tenant, conversation_id)
        with self._indexed(topic, conversation_id) as indexed:
            self._extend(topic, conversation_id, indexed, time.monotonic() + DEADLINE_S)
            index = indexed.index
            messages, summaries = index.counts(index.end)
            return Outline(
                topic_id=indexed.topic_id,
                created_ms=index.created_ms,
                end=index.end,
                messages=messages,
                summaries=summaries,
            )

    def place(self, tenant: str, conversation_id: str) -> Place:
        """Where it stands and ends. Reads nothing of it."""
        topic = self._topic(tenant, conversation_id)
        if (found := self._log.places([topic]).get(topic)) is None:
            raise _unknown(conversation_id)
        return found

    def tail(self, tenant: str, conversation_id: str, topic_id: str) -> Tail:
        """Its newest records, and those to come, as long as its topic has this id."""
        return Tail(self._log, self._codec, self._topic(tenant, conversation_id), topic_id)

    def moved(self, seen: Mapping[tuple[str, str], Place]) -> list[tuple[str, str]]:
        """Of these conversations, by tenant and id, those that are in another place than was seen."""
        topics = {key: self._topic(*key) for key in seen}
        places = self._log.places(list(topics.values()))
        return [key for key, place in seen.items() if places.get(topics[key]) != place]

    def told(self, tenant: str, conversation_id: str, limit: int, begin: int, end: int) -> list[Turn]:
        """The messages that count and the summaries: the first `limit` from the offset `begin` to before `end`."""
        found = self._page(tenant, conversation_id, lambda index: index.told(limit, begin, end))
        return [Turn(offset=one.offset, message=one.message) for one, _ in found if one.message is not None]

    def records(
        self, tenant: str, conversation_id: str, limit: int, *, from_offset: int = 0
    ) -> list[ConversationRecord]:
        """All records: the first `limit` at or after `from_offset`. Erased ones come without their message."""
        found = self._page(tenant, conversation_id, lambda index: index.records(limit, from_offset=from_offset))
        return [replace(one, message=None) if erased else one for one, erased in found]

    def _page(
        self, tenant: str, conversation_id: str, choose: Callable[[ConversationIndex], list[int]]
    ) -> list[tuple[ConversationRecord, bool]]:
        """The records at the offsets that `choose` finds in the index, ascending, and whether each is erased."""
        topic = self._topic(tenant, conversation_id)
        give_up = time.monotonic() + DEADLINE_S
        for _ in range(TRIES):
            with self._indexed(topic, conversation_id) as indexed:
                self._extend(topic, conversation_id, indexed, give_up)
                wanted = sorted(choose(indexed.index))
            found = self._read_all(topic, wanted, give_up)
            if [one.offset for one in found] == wanted:
                with indexed.lock:
                    return [(one, indexed.index.is_erased(one)) for one in found]
            self._forget(topic, indexed)  # compaction removed some of them
        raise BrokerUnavailable("the conversation changes while it is read; try again", retry_after_s=1)

    def _extend(
        self, topic: str, conversation_id: str, indexed: _Indexed, give_up: float, *, first_only: bool = False
    ) -> None:
        """Index what was added since the last call; with `first_only` stop at the first record.

        If a read fails, the next call resumes after the last successful one.
        """
        try:
            end = self._log.end(topic)
        except NotFound as error:
            raise _unknown(conversation_id) from error
        if end < indexed.index.end:  # the log was truncated: indexed offsets can hold other records now
            indexed.index = ConversationIndex()
        index, most = indexed.index, 1 if first_only else READ_AT_ONCE
        while index.end < end and not (first_only and index.created_ms is not None):
            raw = self._read(topic, index.end, end, give_up, most)
            index.extend(decoded(self._codec, raw), raw[-1].offset + 1 if len(raw) == most else end)

    def _read_all(self, topic: str, offsets: Sequence[int], give_up: float) -> list[ConversationRecord]:
        wanted = frozenset(offsets)
        raw = itertools.chain.from_iterable(self._read(topic, *one, give_up) for one in ranges(offsets, GAP))
        return list(decoded(self._codec, (one for one in raw if one.offset in wanted)))

    def _read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        found = self._log.read(topic, begin, end, give_up, most)
        with self._guard:
            self.records_read += len(found)
        return found

    def _topic(self, tenant: str, conversation_id: str) -> str:
        return self._names.conversation(check_tenant(tenant), check_conversation_id(conversation_id))

    # -- which indexes are kept

    @contextmanager
    def _indexed(self, topic: str, conversation_id: str) -> Generator[_Indexed]:
        """The index of the current topic, locked. Its new size is counted at the end."""
        topic_id = self._log.topic_id(topic)
        with self._guard:
            indexed = self._indexes.get(topic)
            if indexed is None or indexed.topic_id != topic_id:
                self._drop(topic)
                if topic_id is None:
                    raise _unknown(conversation_id)
                indexed = self._indexes[topic] = _Indexed(topic_id)
        with indexed.lock:
            try:
                yield indexed
            finally:
                self._count(topic, indexed)

    def _count(self, topic: str, indexed: _Indexed) -> None:
        """Count its size, mark it as most recently used, and drop indexes above the limit."""
        with self._guard:
            if self._indexes.get(topic) is not indexed:
                return
            self._weight -= indexed.weight
            indexed.weight = len(indexed.index) + INDEX_WEIGHT
            self._weight += indexed.weight
            self._indexes.move_to_end(topic)
            if indexed.weight > self._most_records / 2:
                self._drop(topic)
            while self._weight > self._most_records:
                self._drop(next(iter(self._indexes)))

    def _forget(self, topic: str, indexed: _Indexed) -> None:
        with self._guard:
            if self._indexes.get(topic) is indexed:
                self._drop(topic)

    def _drop(self, topic: str) -> None:
        """Called with the guard."""
        indexed = self._indexes.pop(topic, None)
        if indexed is not None:
            self._weight -= indexed.weight
            indexed.weight = 0


def _unknown(conversation_id: str) -> NotFound:
    return NotFound(f"conversation {conversation_id} does not exist", param="conversation_id")
