"""What of the result topic is still needed: open requests with a callback, folded, and what may be committed. Pure.

The fold needs all events of a request: a worker that lost its partition may write an outcome that does not count. So
the offset stays before the first event of each request that has not ended, or whose webhook is not kept yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import HORIZON_MS, TP

Key = tuple[str, str]
FORGET_MS = HORIZON_MS + 3_600_000
"""No request is open for longer: its outcome, if it ever had one, was lost with its topic."""


@dataclass(slots=True)
class _Open:
    first_offset: int
    at_ms: int
    fold: ResultFold


@dataclass(slots=True)
class _Partition:
    position: int = -1
    committed: int = -1
    open: dict[Key, _Open] = field(default_factory=dict[Key, _Open])
    """In the order of their first events."""


class ResultLog:
    """The partitions that this process owns."""

    def __init__(self) -> None:
        self._partitions: dict[TP, _Partition] = {}

    def assign(self, tp: TP) -> None:
        self._partitions.setdefault(tp, _Partition())

    def revoke(self, tp: TP) -> None:
        self._partitions.pop(tp, None)

    def on_event(self, tp: TP, offset: int, at_ms: int, event: ResultEvent) -> bool:
        """Take an event of a request with a callback; whether it is the request's one outcome."""
        partition = self._partitions[tp]
        key = (event.tenant, event.request_id)
        request = partition.open.get(key)
        if request is None:
            fold = ResultFold(event.request_id, event.tenant)
            request = partition.open[key] = _Open(offset, at_ms, fold)
        if not event.is_terminal:
            request.fold.pass_over(event)
            return False
        request.fold.apply(event, offset)
        return request.fold.terminal is event

    def passed(self, tp: TP, position: int, now_ms: int) -> None:
        """All before `position` was read."""
        if (partition := self._partitions.get(tp)) is None:
            return
        partition.position = max(partition.position, position)
        while partition.open and partition.open[key := next(iter(partition.open))].at_ms < now_ms - FORGET_MS:
            del partition.open[key]

    def settle(self, tp: TP, key: Key) -> None:
        """What its events led to is kept elsewhere."""
        if (partition := self._partitions.get(tp)) is not None:
            partition.open.pop(key, None)

    def commits(self) -> dict[TP, int]:
        """What may be committed and was not given yet."""
        due: dict[TP, int] = {}
        for tp, partition in self._partitions.items():
            first = next(iter(partition.open.values()), None)
            offset = partition.position if first is None else min(partition.position, first.first_offset)
            if offset > partition.committed:
                partition.committed = due[tp] = offset
        return due
