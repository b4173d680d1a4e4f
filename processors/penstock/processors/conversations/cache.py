"""Conversations kept in memory, so that a turn reads only the unseen tail of its topic; bounded by bytes. Pure."""

from __future__ import annotations

from collections import OrderedDict

from penstock.processors.conversations.log import ConversationLog


class LogCache:
    """Topic → log, at most `limit_bytes` in all; the one that was used least recently leaves first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._logs: OrderedDict[str, tuple[ConversationLog, int]] = OrderedDict()
        self.used_bytes = 0

    def get(self, topic: str) -> ConversationLog | None:
        kept = self._logs.get(topic)
        return None if kept is None else kept[0]

    def put(self, topic: str, log: ConversationLog) -> None:
        """Keep the log, counted at the size that it has now. One that alone is over the limit is not kept."""
        self.drop(topic)
        if log.size_bytes > self._limit_bytes:
            return
        self._logs[topic] = (log, log.size_bytes)
        self.used_bytes += log.size_bytes
        while self.used_bytes > self._limit_bytes:
            self.drop(next(iter(self._logs)))

    def drop(self, topic: str) -> None:
        kept = self._logs.pop(topic, None)
        if kept is not None:
            self.used_bytes -= kept[1]

    def __len__(self) -> int:
        return len(self._logs)
