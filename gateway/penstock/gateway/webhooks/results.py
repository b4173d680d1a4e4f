"""What of the result topic is still needed: open requests with a callback, folded, and what may be committed. Pure.

The fold needs all events of a request: a worker that lost its partition may write an outcome that does not count. So
the offset stays before the first event of each request that has not ended, or whose webhook is not kept yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.held_offsets import HeldOffsets
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ResultEvent
from penstock.schemas.topics import HORIZON_MS, TP

Key = tuple[str, str]
FORGET_MS = HORIZON_MS + 3_600_000
"""No request is open for longer: its outcome, if it ever had one, was lost with its topic."""


@dataclass(slots=True)
class _Open:
    key: Key
    first_offset: int
    at_ms: int
    fold: ResultFold


class ResultLog:
    """The partitions that this process owns. `offsets` holds the first events of open requests."""

    def __init__(self) -> None:
        self.offsets = HeldOffsets[_Open]()
        self._open: dict[tuple[TP, Key], _Open] = {}

    def revoke(self, tp: TP) -> None:
        for request in self.offsets.revoke(tp):
            del self._open[tp, request.key]

    def on_event(self, tp: TP, offset: int, at_ms: int, event: ResultEvent) -> bool:
        """Take an event of a request with a callback; whether it is the request's one outcome."""
        key = (event.tenant, event.request_id)
        request = self._open.get((tp, key))
        if request is None:
            request = _Open(key, offset, at_ms, ResultFold(event.request_id, event.tenant))
            self.offsets.hold(tp, offset, request)
            self._open[tp, key] = request
        if not event.is_terminal:
            request.fold.pass_over(event)
            return False
        request.fold.apply(event, offset)
        return request.fold.terminal is event

    def passed(self, tp: TP, position: int, now_ms: int) -> None:
        """All before `position` was read."""
        self.offsets.passed(tp, position)
        while (request := self.offsets.first(tp)) is not None and request.at_ms < now_ms - FORGET_MS:
            self.settle(tp, request.key)

    def settle(self, tp: TP, key: Key) -> None:
        """What its events led to is kept elsewhere."""
        if (request := self._open.pop((tp, key), None)) is not None:
            self.offsets.release(tp, request.first_offset)
