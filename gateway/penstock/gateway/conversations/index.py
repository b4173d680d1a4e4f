"""Index of one conversation: the offsets of its records, and which of them count. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.common.conversations import ConversationRecord
from penstock.common.forks import TopicForks
from penstock.common.shards.addresses import head_of
from penstock.schemas.records import ConversationMessage

Slot = tuple[int, str | None, str, int]
"""(deletions before it, request_id, direction, number) of a message or summary. Of several records of one slot the
lowest offset counts."""


MESSAGES = frozenset({"in", "out", "summary"})
"""Directions of messages and summaries; other records are about forks and deletions."""


class Said(NamedTuple):
    """Which message a record holds, without what it says."""

    request_id: str | None
    direction: str
    number: int


class HeadRecord(NamedTuple):
    """A record of which only the head was read, unless it is about forks or a deletion. See `ConversationRecord`."""

    offset: int
    timestamp_ms: int
    key: str
    message: Said | ConversationMessage | None


Records = Iterable[ConversationRecord] | Iterable[HeadRecord]


class ConversationIndex:
    """Built from the records of one topic in log order; agrees with `fold_messages` of them. Holds no contents.

    Offsets are Kafka's.

    Compaction can remove indexed records. If a read by offset does not find all of them, discard the index.
    """

    def __init__(self, end: int | None = None, *, topic_id: str | None = None) -> None:
        """`end`: it is built from there on alone, of a window of the log. `topic_id`: the conversation's, or that of
        its topic."""
        self._head = head_of(topic_id)
        """In the shared topic the first record makes the conversation, and goes last."""
        self.end = (self._head or 0) if end is None else end
        """Everything below this offset is indexed; the next read begins here."""
        self.created_ms: int | None = None
        """The time of the first record."""
        self.forks = TopicForks(self._head)
        self._offsets: list[int] = []
        self._live: dict[str, tuple[int, Slot | None]] = {}
        """By key: the offset of its live record, and the place if that is a message or a summary."""
        self._written: dict[Slot, list[int]] = {}
        """By place: the offsets of its live records, ascending. Several epochs can have written one."""
        self._turns: list[int] = []
        self._summaries: list[int] = []
        """Offsets of the summaries that stand, one for each request that made one."""
        self._erased: dict[str, int] = {}
        """By key: the offset of its newest tombstone."""
        self.is_thin = False
        """It holds tombstones alone, and what is said of forks."""

    def __len__(self) -> int:
        return len(self._erased) + len(self.forks.forks) if self.is_thin else len(self._offsets)

    def thin(self) -> ConversationIndex:
        """One that holds little of a long conversation: its `window` says which records of a part count. There must be
        no deletion."""
        made = ConversationIndex(self.end)
        made.is_thin, made.created_ms, made.forks, made._erased = True, self.created_ms, self.forks, self._erased
        return made

    def window(self, records: Records, begin: int, end: int) -> ConversationIndex:
        """An index of the records from `begin` to before `end`. What stood before `begin` is as if it was not there;
        later tombstones count, as far as this one has them."""
        made = ConversationIndex(begin)
        made.extend(records, end)
        for key, (offset, _) in list(made._live.items()):
            if (erased := self._erased.get(key, -1)) > offset:
                made._erase(key, erased)
        return made

    def extend(self, records: Records, end: int) -> None:
        """Add the records from `self.end` to `end` (exclusive)."""
        for record in records:
            if self.created_ms is None:
                self.created_ms = record.timestamp_ms
            if isinstance(record.message, Said):
                self.forks.passed(record.offset, record.key)
            else:
                self.forks.apply(record.offset, record.key, record.message)
            if self.is_thin:
                if record.message is None:
                    self._erased[record.key] = record.offset
                continue
            self._offsets.append(record.offset)
            if record.message is None:
                self._erase(record.key, record.offset)
            elif record.key not in self._live:
                self._add(record.key, record.offset, _place_of(record, len(self.forks.deletions)))
        self.end = end

    def turns(
        self,
        limit: int,
        *,
        after: int | None = None,
        newest_first: bool = False,
        begin: int = 0,
        end: int | None = None,
    ) -> list[int]:
        """Offsets of the messages that count, from `begin` to before `end`: the first `limit` in this order, after the
        offset `after`."""
        first = bisect.bisect_left(self._turns, begin)
        last = len(self._turns) if end is None else bisect.bisect_left(self._turns, end)
        if newest_first:
            last = last if after is None else min(last, bisect.bisect_left(self._turns, after))
            return self._turns[max(first, last - limit) : last][::-1]
        first = first if after is None else max(first, bisect.bisect_right(self._turns, after))
        return self._turns[first : min(last, first + limit)]

    def told(self, limit: int, begin: int, end: int) -> list[int]:
        """Offsets of messages that count and of summaries: the first `limit` from `begin` to before `end`."""
        found: list[int] = []
        for offsets in (self._turns, self._summaries):
            first = bisect.bisect_left(offsets, begin)
            found += offsets[first : min(bisect.bisect_left(offsets, end), first + limit)]
        return sorted(found)[:limit]

    def counts(self, begin: int, end: int) -> tuple[int, int]:
        """How many messages count and how many summaries stand from `begin` to before `end`."""

        def count(offsets: list[int]) -> int:
            return max(0, bisect.bisect_left(offsets, end) - bisect.bisect_left(offsets, begin))

        return count(self._turns), count(self._summaries)

    def records(self, limit: int, *, begin: int = 0, end: int | None = None) -> list[int]:
        """Offsets of all records from `begin` to before `end`, tombstones too: the first `limit`."""
        first = bisect.bisect_left(self._offsets, begin)
        last = len(self._offsets) if end is None else bisect.bisect_left(self._offsets, end)
        return self._offsets[first : min(last, first + limit)]

    def is_deleted(self) -> bool:
        """Whether nothing stands behind the newest deletion: the topic is there for forks alone."""
        if not self.forks.deletions:
            return False
        begin = self.own_begin()
        live = reversed(self._live.items())
        says_nothing = self.forks.forks.keys() | self.forks.void
        return not any(offset >= begin and key not in says_nothing for key, (offset, _) in live)

    def keys_before_deletion(self) -> list[str]:
        """Keys of the live records that stand before the newest deletion, but for those that name forks."""
        begin = self.own_begin()
        return [
            key
            for key, (offset, _) in self._live.items()
            if offset < begin - 1
            and offset != self._head
            and key not in self.forks.forks
            and not key.startswith("deleted/")
        ]

    def own_begin(self) -> int:
        """The offset behind the newest deletion."""
        return self.forks.begin() - self.forks.base

    def is_erased(self, record: ConversationRecord) -> bool:
        """Whether a later tombstone has this record's key."""
        return record.offset < self._erased.get(record.key, 0)

    def _add(self, key: str, offset: int, place: Slot | None) -> None:
        self._live[key] = offset, place
        if place is not None:
            written = self._written.setdefault(place, [])
            written.append(offset)
            if len(written) == 1:
                self._listed(place).append(offset)

    def _erase(self, key: str, offset: int) -> None:
        self._erased[key] = offset
        gone, place = self._live.pop(key, (0, None))
        if place is None:
            return
        written = self._written[place]
        counted = written[0] == gone
        written.remove(gone)
        if counted:
            offsets = self._listed(place)
            del offsets[bisect.bisect_left(offsets, gone)]
            if written:
                bisect.insort(offsets, written[0])
        if not written:
            del self._written[place]

    def _listed(self, place: Slot) -> list[int]:
        return self._summaries if place[2] == "summary" else self._turns


def _place_of(record: ConversationRecord | HeadRecord, deletions: int) -> Slot | None:
    message = record.message
    if message is None or message.direction not in MESSAGES:
        return None
    number = message.number if isinstance(message, Said) else message.index
    return deletions, message.request_id, message.direction, number


def ranges(offsets: Sequence[int], gap: int) -> list[tuple[int, int]]:
    """Ranges (begin, end exclusive) that cover the offsets. Offsets at most `gap` apart share a range."""
    found: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if found and offset - found[-1][1] <= gap:
            found[-1] = found[-1][0], offset + 1
        else:
            found.append((offset, offset + 1))
    return found
