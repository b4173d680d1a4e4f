"""The buffer of one follow: the records of one key, each once and in order. Pure and thread-safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping

from penstock.common.reader import RawMessage
from penstock.schemas.topics import TP


class Follow:
    """The records of one key, from given offsets on. `on_ready` is called when an empty buffer got something."""

    def __init__(self, key: bytes, begin: Mapping[TP, int], limit: int, on_ready: Callable[[], None]) -> None:
        self.key = key
        self.closed = False
        self._next = dict(begin)
        self._limit = limit
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._buffer: deque[RawMessage] = deque()
        self.parked = False
        """Whether records were left in Kafka because the buffer was full."""

    def next(self, tp: TP) -> int:
        """The offset from which on it wants the records of this partition."""
        return self._next[tp]

    def pass_to(self, tp: TP, offset: int) -> None:
        """Note that no record of its key is before `offset`. Not while it is parked."""
        with self._lock:
            if not self.parked:
                self._next[tp] = max(self._next[tp], offset)

    def offer(self, message: RawMessage) -> bool:
        """Take a record of this key, unless it was taken before. False when there is no room: it is parked then."""
        tp = (message.topic, message.partition)
        with self._lock:
            if message.offset < self._next.get(tp, 1 << 62):
                return True
            if self.parked or len(self._buffer) >= self._limit:
                self.parked = True
                return False
            self._next[tp] = message.offset + 1
            self._buffer.append(message)
            first = len(self._buffer) == 1
        if first:
            self._on_ready()
        return True

    def wake(self) -> None:
        """Let who waits look again."""
        self._on_ready()

    def take(self) -> list[RawMessage]:
        """All buffered records; the buffer is empty then."""
        with self._lock:
            taken = list(self._buffer)
            self._buffer.clear()
        return taken

    def resume(self) -> dict[TP, int]:
        """Leave the parked state; where reading has to go on from."""
        with self._lock:
            self.parked = False
            return dict(self._next)
