"""What the result and status topics hold of requests: which have ended, and which origin readers follow. Pure."""

from __future__ import annotations

from hashlib import blake2b

from penstock.schemas.fold import ResultFold
from penstock.schemas.records import Origin, ResultEvent

Key = tuple[str, str]
"""(tenant, request id)"""


class Outcomes:
    """Takes the events of each topic in order within each partition: all results first, then all statuses."""

    def __init__(self) -> None:
        self.highest_epoch = 0
        self.oldest_ms: int | None = None
        """When the oldest result was published."""
        self._ended: dict[bytes, int] = {}
        """By digest of the key, which takes less memory: when, in ms."""
        self._folds: dict[Key, ResultFold] = {}
        self._by_status: dict[Key, Origin] = {}

    def on_result(self, event: ResultEvent) -> None:
        """Take the next result; its text is not needed."""
        self.highest_epoch = max(self.highest_epoch, event.epoch)
        self.oldest_ms = event.created_at if self.oldest_ms is None else min(self.oldest_ms, event.created_at)
        key = (event.tenant, event.request_id)
        if _digest(key) in self._ended:
            return
        fold = self._folds.setdefault(key, ResultFold(event.request_id, event.tenant))
        if not event.is_terminal:
            fold.pass_over(event)
            return
        fold.apply(event)
        if fold.terminal is event:
            self._ended[_digest(key)] = event.created_at
            del self._folds[key]

    def on_status(self, key: Key, origin: Origin, epoch: int) -> None:
        """Take the next status."""
        self.highest_epoch = max(self.highest_epoch, epoch)
        if _digest(key) not in self._ended:
            self._by_status.setdefault(key, origin)

    def ended_ms(self, key: Key) -> int | None:
        """When the request got its outcome; None if it has none."""
        return self._ended.get(_digest(key))

    def followed(self, key: Key) -> Origin | None:
        """The origin that readers of an unfinished request follow; None while nothing was published of it."""
        fold = self._folds.get(key)
        return (None if fold is None else fold.origin) or self._by_status.get(key)


def _digest(key: Key) -> bytes:
    return blake2b("\n".join(key).encode(), digest_size=12).digest()
