"""Decisions of a replay of many conversations: where each begins, what is read next, at which rate. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, TypedDict

from penstock.common.group_positions import Kept
from penstock.schemas.errors import Conflict, InvalidRequest
from penstock.schemas.records import ConversationMessage
from penstock.schemas.topics import TP

Range = tuple[int, int]
"""Offsets: from, to but not with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedRecord:
    """A record of a conversation. `message` is None for a tombstone: what had this key was erased.

    `offset` is Kafka's: in the conversation's topic, or in its partition of the topic that conversations share.
    """

    conversation_id: str
    offset: int
    timestamp_ms: int
    key: str
    message: ConversationMessage | None


class ReplayOptions(TypedDict, total=False):
    """Keyword arguments of `replay_conversations`."""

    group: str | None
    """Name of the consumer group that keeps the position in each partition; without one nothing is kept."""
    from_offset: int | None
    """Where a partition without a kept position begins; without this and `since_ms` at its first record."""
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
    """The offset to begin at in a partition whose log has these bounds.

    A kept position of another topic of this name is that of a deleted conversation, and one behind the end that of a
    log that lost records: both count for nothing.
    """
    first, end = bounds
    if kept is not None and kept.topic_id in ("", topic_id) and kept.offset <= end:
        return max(kept.offset, first)
    return max(start, first)


def check_kept(kept: Kept, topic_id: str, note: str, group: str) -> None:
    """Raises Conflict for a position of another replay: in a topic that conversations share it would skip records.

    `note` says whose records were passed; a position without one was set by Kafka's own tools.
    """
    if note and kept.topic_id == topic_id and kept.note not in ("", note):
        try:
            tenant, pattern = json.loads(kept.note)
            theirs = f"the conversations {pattern!r} of the tenant {tenant}"
        except (TypeError, ValueError):
            theirs = "another service"
        text = f"the group {group} keeps the positions of {theirs}: each pattern needs a group of its own"
        raise Conflict(text, param="group")


def matching(pattern: str, conversation_ids: Iterable[str]) -> list[str]:
    return sorted(one for one in conversation_ids if fnmatchcase(one, pattern))


def next_window(behind: Iterable[tuple[TP, Range]], most_records: int, most_places: int) -> dict[TP, Range]:
    """Of what is to be read the part to read now: whole partitions in order, the first one cut if it is too long."""
    window: dict[TP, Range] = {}
    left = most_records
    for place, (begin, end) in behind:
        if window and (end - begin > left or len(window) == most_places):
            break
        window[place] = begin, min(end, begin + left)
        left -= window[place][1] - begin
    return window


class Piece(NamedTuple):
    """Records of one conversation, and the position in the partition once they are taken."""

    records: list[ReplayedRecord]
    through: int


def cut(conversations: Iterable[Sequence[ReplayedRecord]], most_records: int, through: int) -> list[Piece]:
    """The records of a range of a partition up to `through`, by conversation and in order, in pieces.

    What begins first comes first, and each piece takes the position to the first record that is left: a kill between
    two repeats as little as the order allows. Without records the one piece is empty.
    """
    pieces = [list(one[at : at + most_records]) for one in conversations for at in range(0, len(one), most_records)]
    pieces.sort(key=lambda piece: piece[0].offset)
    begins = [*(piece[0].offset for piece in pieces[1:]), through]
    return [Piece(*one) for one in zip(pieces or [[]], begins, strict=True)]


class Erasures:
    """Tombstones of one partition, of all records that were looked at."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, int] = {}

    def add(self, key: bytes, offset: int) -> None:
        self._by_key[key] = max(offset, self._by_key.get(key, -1))

    def erase(self, key: bytes, offset: int) -> bool:
        """Whether a later tombstone has the key of this record."""
        return offset < self._by_key.get(key, -1)

    def drop_before(self, offset: int) -> None:
        """Records before it are not asked for any more."""
        self._by_key = {key: at for key, at in self._by_key.items() if at >= offset}


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
