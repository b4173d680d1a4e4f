"""The newest records of a conversation, and all that is appended from then on: which of them are messages that count.

A conversation of any length is followed without reading it from its beginning. Of two records of one message the first
counts, and it stands shortly before the second: turns are retried in place. So a part of the log is enough to know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.common.conversations import Turn, decoded
from penstock.common.reader import RawMessage
from penstock.gateway.conversations.index import ConversationIndex, ranges
from penstock.schemas.codec import Codec
from penstock.schemas.errors import NotFound

BACK_RECORDS = 1_000
MOST_RECORDS = 10_000
"""A longer index begins anew with the newest records; each takes about 500 bytes."""
READ_AT_ONCE = 2_000
GAP = 100
DEADLINE_S = 10.0


class TopicEnd(NamedTuple):
    """Kafka's id of a topic, and the offset of its next record: Kafka's, or with a `base` the conversation's."""

    topic_id: str
    end: int
    base: int = 0

    def counted_from(self, base: int) -> TopicEnd:
        """With the offsets of a conversation whose first own record has the offset `base`."""
        return TopicEnd(self.topic_id, self.end - self.base + base, base)


class Log(Protocol):
    """What is read of topics. All methods block, and raise BrokerUnavailable."""

    def places(self, topics: Sequence[str]) -> dict[str, TopicEnd]:
        """Those of the topics that exist. Raises NotFound for one that is deleted at this moment."""
        ...

    def back(self, topic: str, end: int, records: int) -> int:
        """An offset with at least so many records from it to before `end`, or all that there are."""
        ...

    def read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        """The records from `begin` to before `end`, or the first `most` of them. Raises NotFound."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The messages that count from the offset `begin` to before `end`."""

    begin: int
    end: int
    turns: Sequence[Turn]


class Tail:
    """Offsets are the conversation's. All methods block and are thread-safe. They raise NotFound when the topic is gone
    or is another one, or the conversation was deleted in it; BrokerUnavailable, RegistryUnavailable."""

    def __init__(self, log: Log, codec: Codec, topic: str, place: TopicEnd) -> None:
        self._log, self._codec, self._topic = log, codec, topic
        self._topic_id, self._base, self._first_end = place.topic_id, place.base, place.end - place.base
        self._lock = threading.Lock()
        self._index = ConversationIndex()
        self._begin: int | None = None
        """Everything from here to `_index.end` is indexed, at Kafka's offsets."""

    def refresh(self) -> int:
        """Index what was appended; where the conversation ends."""
        place = self._log.places([self._topic]).get(self._topic)
        if place is None or place.topic_id != self._topic_id:
            raise NotFound("the conversation was deleted", param="conversation_id")
        give_up = time.monotonic() + DEADLINE_S
        with self._lock:
            if self._begin is None or len(self._index) > MOST_RECORDS or place.end < self._index.end:
                self._index, self._begin = ConversationIndex(), self._log.back(self._topic, place.end, BACK_RECORDS)
                self._index.end = self._begin
            while (begin := self._index.end) < place.end:
                raw = self._log.read(self._topic, begin, place.end, give_up, READ_AT_ONCE)
                read_to = raw[-1].offset + 1 if len(raw) == READ_AT_ONCE else place.end
                self._index.extend(decoded(self._codec, raw), read_to)
            if self._index.forks.deletions and self._index.own_begin() > self._first_end:
                raise NotFound("the conversation was deleted", param="conversation_id")
        return self._base + place.end

    def part(self, begin: int, limit: int) -> Part | None:
        """The first `limit` messages from `begin` on; None if the index begins behind that.

        A message whose record is gone was erased, and is left out.
        """
        if self._begin is None:
            self.refresh()
        begin -= self._base
        with self._lock:
            if self._begin is None or begin < self._begin:
                return None
            index = self._index
            wanted = index.turns(limit, after=begin - 1, begin=index.own_begin())
            end = wanted[-1] + 1 if len(wanted) == limit else max(begin, index.end)
        give_up = time.monotonic() + DEADLINE_S
        raw = [one for span in ranges(wanted, GAP) for one in self._log.read(self._topic, *span, give_up)]
        chosen = frozenset(wanted)
        records = list(decoded(self._codec, (one for one in raw if one.offset in chosen)))
        with self._lock:
            seen = [one for one in records if not index.is_erased(one)]
        base = self._base
        turns = [Turn(offset=base + one.offset, message=one.message) for one in seen if one.message is not None]
        return Part(begin=base + begin, end=base + end, turns=turns)
