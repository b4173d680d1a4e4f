"""Decisions of a replay of many conversations: where each begins, what is read next, at which rate. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypedDict

from penstock.common.conversations import ConversationRecord
from penstock.common.group_positions import Kept
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import ConversationMessage

Range = tuple[int, int]
"""Offsets: from, to but not with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedRecord:
    """A record of a conversation's topic. `message` is None for a tombstone: what had this key was erased."""

    conversation_id: str
    offset: int
    timestamp_ms: int
    key: str
    message: ConversationMessage | None


class ReplayOptions(TypedDict, total=False):
    """Keyword arguments of `replay_conversations`."""

    group: str | None
    """Name of the consumer group that keeps the position in each conversation; without one nothing is kept."""
    from_offset: int | None
    """Where a conversation without a kept position begins; without this and `since_ms` at its first record."""
    since_ms: int | None
    """The same by time, in milliseconds since the epoch: the first record that is not older."""
    rate: float | None
    """At most so many records per second."""
    follow: bool
    """Go on with what is appended and with new conversations, instead of ending at the end as it is now."""
    batch_records: int
    """Records of a batch at most (100)."""


def check_options(options: ReplayOptions) -> None:
    """Raises InvalidRequest for what cannot be."""
    rate, from_offset = options.get("rate"), options.get("from_offset")
    if options.get("group") == "":
        raise InvalidRequest("group must not be empty", param="group")
    if from_offset is not None and options.get("since_ms") is not None:
        raise InvalidRequest("give from_offset or since_ms, not both", param="since_ms")
    if from_offset is not None and from_offset < 0:
        raise InvalidRequest("from_offset must be 0 or more", param="from_offset")
    if rate is not None and not 0 < rate < float("inf"):
        raise InvalidRequest("rate must be a number of records per second above 0", param="rate")
    if options.get("batch_records", 1) < 1:
        raise InvalidRequest("batch_records must be 1 or more", param="batch_records")


def begin_at(kept: Kept | None, topic_id: str, start: int, bounds: Range) -> int:
    """The offset to begin at in a topic whose log has these bounds.

    A kept position of another topic of this name is that of a deleted conversation, and one behind the end that of a
    log that lost records: both count for nothing.
    """
    first, end = bounds
    if kept is not None and kept.topic_id in ("", topic_id) and kept.offset <= end:
        return max(kept.offset, first)
    return max(start, first)


def matching(pattern: str, conversation_ids: Iterable[str]) -> list[str]:
    """Ids that match the glob, sorted."""
    return sorted(one for one in conversation_ids if fnmatchcase(one, pattern))


def next_window(behind: Iterable[tuple[str, Range]], most_records: int, most_topics: int) -> dict[str, Range]:
    """Of what is to be read the part to read now: whole conversations in order, the first one cut if it is too long."""
    window: dict[str, Range] = {}
    left = most_records
    for topic, (begin, end) in behind:
        if window and (end - begin > left or len(window) == most_topics):
            break
        window[topic] = begin, min(end, begin + left)
        left -= window[topic][1] - begin
    return window


class Erasures:
    """Tombstones of one conversation, of all records that were looked at."""

    def __init__(self) -> None:
        self.looked_to = 0
        """Everything that the caller needs below this offset was looked at."""
        self._by_key: dict[str, int] = {}

    def add(self, key: str, offset: int) -> None:
        self._by_key[key] = max(offset, self._by_key.get(key, -1))

    def erase(self, record: ConversationRecord) -> bool:
        """Whether a later tombstone has this record's key."""
        return record.offset < self._by_key.get(record.key, -1)


class Pace:
    """Spreads records evenly: `wait_s` before the next ones. Times in seconds of any clock."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = float("-inf")

    def most(self, records: int) -> int:
        """The largest batch: what comes in a second, at least one record."""
        return records if self._rate is None else max(1, min(records, int(self._rate)))

    def count(self, records: int, now: float) -> None:
        """Note that so many were handed out."""
        if self._rate is not None:
            self._due = max(self._due, now) + records / self._rate

    def wait_s(self, now: float) -> float:
        return max(0.0, self._due - now)
