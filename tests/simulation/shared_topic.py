"""The layout in which all conversations share a topic, and copies of it that know it up to a position.

The product's own code finds, reads and removes conversations. What it does so on is made here: `ModelCopy` stands for
`ShardCopy` and its file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from penstock.common.forks import ForkRecord, begin_record
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import HEAD, Address, address_of, head_of, split_key
from penstock.common.shards.heads import Heads
from penstock.common.shards.scanning import of_conversation
from penstock.common.shards.shard_file import Span
from penstock.common.transport import Delivery
from penstock.gateway.conversations.shared import SharedTopic as GatewayTopic
from penstock.processors.conversations.shared_log import SharedLog
from penstock.schemas.topics import TopicNames, conversation_of_key
from simulation.layouts import Record, Value, View
from simulation.truth import Violation

NAMES = TopicNames()
Row = tuple[int, int, bytes, Value]


class SharedTopic:
    """A `Layout`: one topic, whose partitions stay as many as they are."""

    is_shared = True

    def __init__(self, partitions: int) -> None:
        self.logs: list[list[Record]] = [[] for _ in range(partitions)]
        """By partition. Keys are the topic's."""
        self._copy = ModelCopy(self.logs)
        self._all = CopyView(self._copy)
        self._numbers = itertools.count()

    def topic_id(self, line: str) -> str | None:
        return self._all.topic_id(line)

    def records(self, line: str) -> Sequence[Record]:
        return self._all.records(line)

    def view(self) -> View | None:
        return CopyView(ModelCopy(self.logs))

    def lines(self) -> list[str]:
        return self._copy.refresh(range(len(self.logs))).lines()

    def open(self, line: str, seen: str | None) -> None:
        """Two that have looked write a head each."""
        if seen is None:
            self.begin(line, begin_record(*conversation_of_key(line), f"h{next(self._numbers)}", 0))

    def begin(self, line: str, first: ForkRecord) -> None:
        self.append(line, [(first.key.encode(), first.message)])

    def append(self, line: str, records: Iterable[tuple[bytes, Value]]) -> bool:
        """Kafka asks for no head."""
        address = self._address(line)
        self._put(address.partition, [(address.key(key), value) for key, value in records])
        return True

    def removal(self, line: str) -> list[Callable[[], object]]:
        """What the gateway sends, one after the other: all that it has read goes, then the head, then the rest."""
        address, sent = self._address(line), _Sent()
        GatewayTopic(cast(Any, self._copy), cast(Any, sent), NAMES, cast(Any, None)).remove(_topic(line))
        steps = itertools.groupby(sent.keys, lambda key: key.startswith(address.key(HEAD)))
        return [partial(self._put, address.partition, [(key, None) for key in keys]) for _, keys in steps]

    def check(self) -> None:
        """Who reads without a copy, passing over the whole partition, sees what copies hold."""
        for line in self.lines():
            address = self._address(line)
            log = (
                RawMessage("", address.partition, offset, 0, key, None if value is None else b"")
                for offset, key, value in self.logs[address.partition]
            )
            head, found = of_conversation(list(log), address)
            scanned = _live((one.offset, one.key or b"", one.value) for one in found)
            held = _live(self.records(line))
            if held != scanned:
                raise Violation(f"scan: {line} is {scanned} to a reader without a copy, and copies hold {held}")
            if head_of(self.topic_id(line)) != head:
                raise Violation(f"scan: {line} begins at {head}, and its id is {self.topic_id(line)}")

    def _put(self, partition: int, records: Iterable[tuple[bytes, Value]]) -> None:
        log = self.logs[partition]
        log.extend([(offset, key, value) for offset, (key, value) in enumerate(records, len(log))])

    def _address(self, line: str) -> Address:
        return address_of(NAMES, _topic(line), len(self.logs))


class CopyView:
    """A `View`: what a worker reads from its copy."""

    def __init__(self, copy: ModelCopy) -> None:
        self._log = SharedLog(cast(Any, copy), cast(Any, None), NAMES, cast(Any, None))

    def topic_id(self, line: str) -> str | None:
        return self._log.find(_topic(line), 0.0)

    def records(self, line: str) -> Sequence[Record]:
        return cast("list[Record]", self._log.read(_topic(line), 0, 0.0))


class ModelCopy:
    """Stands for `ShardCopy` and for its file. It takes no time: callers say how long it was behind."""

    topic = NAMES.conversation_log
    topic_id = "shared"

    def __init__(self, logs: list[list[Record]]) -> None:
        self.partitions = len(logs)
        self._logs = logs
        self._shards = [_Shard() for _ in logs]

    def refresh(self, partitions: Iterable[int], timeout_s: float = 0.0) -> ModelCopy:
        """All is in it that stands in these partitions now."""
        for partition in partitions:
            self.follow(partition, self.end(partition))
        return self

    def end(self, partition: int) -> int:
        """Of the topic, whatever the copy has of it."""
        return len(self._logs[partition])

    def follow(self, partition: int, end: int) -> None:
        """Take what stands below an offset."""
        shard = self._shards[partition]
        for record in self._logs[partition][shard.position : end]:
            shard.take(*record)

    # -- as the file has it

    def lines(self) -> list[str]:
        return [line for shard in self._shards for line in shard.heads.conversations()]

    def span(self, line: str) -> Span | None:
        shard = self._shard(line)
        head = shard.heads.first(line)
        return None if head is None else Span(head, shard.records[line][-1][0] + 1, 0)

    def records(self, line: str, begin: int, end: int | None = None) -> list[Row]:
        """Records from an offset to before another, each with a time."""
        return [
            (offset, 0, key, value)
            for offset, key, value in self._shard(line).records.get(line, ())
            if begin <= offset and (end is None or offset < end)
        ]

    def live_keys(self, line: str) -> list[bytes]:
        """Of the records that have no tombstone, in the order of the log."""
        return list(dict.fromkeys(key for _, key in _live(self._shard(line).records.get(line, ()))))

    def _shard(self, line: str) -> _Shard:
        return self._shards[address_of(NAMES, _topic(line), self.partitions).partition]


class _Shard:
    """What was read of a partition, by conversation. What has a tombstone, or stands behind a head that has gone, is
    not kept."""

    def __init__(self) -> None:
        self.position = 0
        self.heads = Heads()
        self.records: dict[str, list[Record]] = {}

    def take(self, offset: int, key: bytes, value: Value) -> None:
        self.position = offset + 1
        split = split_key(key)
        if split is None:
            raise Violation(f"key: {key!r} is of no conversation")
        line, own_key = split
        if own_key.startswith(HEAD):
            self.heads.apply(line, own_key, offset, is_tombstone=value is None)
        if self.heads.first(line) is None:
            self.records.pop(line, None)
            return
        records = self.records.setdefault(line, [])
        if value is None:
            records[:] = [one for one in records if one[1] != own_key]
        records.append((offset, own_key, value))


class _Sent:
    """Stands for `Transport`: remembers the keys that were sent, each acknowledged at once."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    def send(
        self, topic: str, value: bytes | None, *, key: bytes, partition: int, on_delivery: Callable[[Delivery], None]
    ) -> None:
        self.keys.append(key)
        on_delivery(Delivery(topic=topic, partition=partition, offset=len(self.keys), timestamp_ms=0))


def _live(records: Iterable[tuple[int, bytes, object]]) -> list[tuple[int, bytes]]:
    """(offset, key) of those that have no tombstone."""
    found: dict[bytes, list[int]] = {}
    for offset, key, value in records:
        found[key] = [] if value is None else [*found.get(key, ()), offset]
    return sorted((offset, key) for key, offsets in found.items() for offset in offsets)


def _topic(line: str) -> str:
    """The topic that the conversation would have."""
    return NAMES.conversation(*conversation_of_key(line))
