"""What the refetcher's thread holds: its consumers, the ranges under way, records that came along, and what to tell."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, cast

from confluent_kafka import Consumer, Message

from penstock.common.reader import RawMessage
from penstock.common.refetch_plan import Range
from penstock.schemas.topics import TP

MESSAGE_OVERHEAD_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RefetchStats:
    """Sums since the start. `bytes_read` is what the brokers sent to both handles, protocol included, a second ago."""

    fetched: int
    gone: int
    bytes_needed: int
    bytes_read: int
    wanted: int


@dataclass(slots=True)
class ActiveRange:
    """A range that is being read. What lies below `position` has come, or will not come."""

    range: Range
    position: int
    resolved: int = 0
    eof_since: float | None = None
    positioned: bool = True

    @property
    def rest(self) -> tuple[int, ...]:
        return self.range.offsets[self.resolved :]


@dataclass(slots=True)
class Handle:
    """One consumer and the partitions that it reads; `idle` are assigned without a range, since then."""

    config: dict[str, Any]
    consumer: Consumer | None = None
    active: dict[TP, ActiveRange] = field(default_factory=dict[TP, ActiveRange])
    idle: dict[TP, float] = field(default_factory=dict[TP, float])
    heard_at: float = 0.0
    bytes_read: int = 0
    bytes_read_before: int = 0

    def note_statistics(self, text: str) -> None:
        brokers = cast("dict[str, dict[str, Any]]", json.loads(text).get("brokers", {}))
        self.bytes_read = self.bytes_read_before + sum(int(broker["rxbytes"]) for broker in brokers.values())


class KeptRecords:
    """Records that came in the batches of others: Kafka would send the whole batch again. The oldest leave first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._messages: OrderedDict[tuple[TP, int], Message] = OrderedDict()

    def put(self, tp: TP, offset: int, message: Message) -> None:
        self.take(tp, offset)
        self._messages[tp, offset] = message
        self._used_bytes += len(message) + MESSAGE_OVERHEAD_BYTES
        while self._used_bytes > self._limit_bytes:
            _, oldest = self._messages.popitem(last=False)
            self._used_bytes -= len(oldest) + MESSAGE_OVERHEAD_BYTES

    def take(self, tp: TP, offset: int) -> Message | None:
        message = self._messages.pop((tp, offset), None)
        if message is not None:
            self._used_bytes -= len(message) + MESSAGE_OVERHEAD_BYTES
        return message

    def forget(self, tp: TP) -> None:
        for key in [key for key in self._messages if key[0] == tp]:
            self.take(*key)


@dataclass(slots=True)
class Outcome:
    """What one pass of the thread has to tell of a partition."""

    fetched: list[RawMessage] = field(default_factory=list[RawMessage])
    gone: list[int] = field(default_factory=list[int])
