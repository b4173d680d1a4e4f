"""Topics of one partition in memory, compacted as Kafka does it: what tests of conversations write to and read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.common.reader import RawMessage
from penstock.schemas.errors import NotFound


def compacted(records: Sequence[RawMessage], end: int, tombstones_too: bool) -> list[RawMessage]:
    """The newest record of a key stays; a log's last one always."""
    newest = {one.key: one.offset for one in records}
    return [
        one
        for one in records
        if one.offset == end - 1 or (newest[one.key] == one.offset and not (one.value is None and tombstones_too))
    ]


class MemoryTopics:
    """By topic: its records, the offset of its next one, and Kafka's id of it. All methods raise NotFound for a topic
    that is not there."""

    def __init__(self) -> None:
        self.logs: dict[str, list[RawMessage]] = {}
        self.ends: dict[str, int] = {}
        self.ids: dict[str, str] = {}
        self._numbers = itertools.count()

    def create(self, topic: str) -> None:
        """Make the topic unless it is there."""
        if topic not in self.ids:
            self.logs[topic], self.ends[topic], self.ids[topic] = [], 0, f"id-{next(self._numbers)}"

    def drop(self, topic: str) -> None:
        for kept in (self.logs, self.ends, self.ids):
            kept.pop(topic, None)

    def give_new_ids(self) -> None:
        """As if all topics were mirrored to another cluster."""
        self.ids = {topic: f"id-{next(self._numbers)}" for topic in self.ids}

    def put(self, topic: str, key: bytes, value: bytes | None, timestamp_ms: int | None = None) -> int:
        """Append a record, at 1,000 ms and its offset if no time is given; the offset."""
        self.require(topic)
        offset = self.ends[topic]
        self.logs[topic].append(
            RawMessage(topic, 0, offset, 1_000 + offset if timestamp_ms is None else timestamp_ms, key, value)
        )
        self.ends[topic] += 1
        return offset

    def compact(self, *, tombstones_too: bool) -> None:
        for topic, records in self.logs.items():
            self.logs[topic] = compacted(records, self.ends[topic], tombstones_too)

    def require(self, topic: str) -> None:
        if topic not in self.ids:
            raise NotFound(f"there is no topic {topic}")
