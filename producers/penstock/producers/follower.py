"""One consumer for all follows of a client: it reads the partitions that somebody waits on, each record once.

A follow begins at an offset from before its request was produced, so the reading may have to go back; what others have
seen already they ignore by offset. A follow whose buffer is full is parked: the records stay in Kafka, and it goes
back for them when it was emptied. So nothing is lost and nothing grows.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from penstock.producers.reader import TP, PartitionReader, RawMessage
from penstock.producers.settings import KafkaSettings
from penstock.schemas.errors import InternalError, Overloaded

logger = logging.getLogger(__name__)


class Follow:
    """The records of one key, from given offsets on. `on_ready` is called when an empty buffer got something."""

    def __init__(self, key: bytes, begin: Mapping[TP, int], limit: int, on_ready: Callable[[], None]) -> None:
        self.key = key
        self._next = dict(begin)
        self._limit = limit
        self._on_ready = on_ready
        self._lock = threading.Lock()
        self._buffer: deque[RawMessage] = deque()
        self._parked = False

    @property
    def parked(self) -> bool:
        """Whether records were left in Kafka because the buffer was full."""
        return self._parked

    def offer(self, message: RawMessage) -> None:
        """Take a record of this key, unless it was taken before or there is no room."""
        tp = (message.topic, message.partition)
        with self._lock:
            if self._parked or message.offset < self._next.get(tp, 1 << 62):
                return
            if len(self._buffer) >= self._limit:
                self._parked = True
                return
            self._next[tp] = message.offset + 1
            self._buffer.append(message)
            first = len(self._buffer) == 1
        if first:
            self._on_ready()

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
            self._parked = False
            return dict(self._next)


class Follower:
    """Follows keys on partitions with one PartitionReader, whose thread alone touches the registry below."""

    def __init__(self, settings: KafkaSettings, *, max_follows: int = 1000, buffer_records: int = 256) -> None:
        self._max_follows = max_follows
        self._buffer_records = buffer_records
        # Partitions come and go with the follows: short waits, so that a new one is not held up by an open fetch.
        self._reader = PartitionReader(
            settings, {}, "end", self._on_batch, fetch_wait_ms=10, poll_s=0.01, name="penstock-follower"
        )
        self._reader.start()
        self._lock = threading.Lock()
        self._open: set[Follow] = set()
        self._stopped = False
        self._by_key: dict[bytes, list[Follow]] = {}
        self._watchers: dict[TP, int] = {}

    def positions(self) -> dict[TP, int]:
        """How far the partitions that are read now have been read."""
        return self._reader.positions()

    def open(self, key: bytes, begin: Mapping[TP, int], on_ready: Callable[[], None]) -> Follow:
        """Begin to follow `key` on these partitions from these offsets. Raises Overloaded beyond `max_follows`."""
        self.check()
        follow = Follow(key, begin, self._buffer_records, on_ready)
        with self._lock:
            if len(self._open) >= self._max_follows:
                raise Overloaded(f"this client follows {self._max_follows} requests already", retry_after_s=1.0)
            self._open.add(follow)
        self._reader.call(lambda: self._begin(follow, begin))
        return follow

    def take(self, follow: Follow) -> list[RawMessage]:
        """What arrived for it. A parked follow goes back for what it left when it is found empty."""
        taken = follow.take()
        if follow.parked:
            self._reader.call(lambda: self._resume(follow))
        return taken

    def close(self, follow: Follow) -> None:
        """End it. Partitions that nobody waits on any more are read no longer."""
        with self._lock:
            if follow not in self._open:
                return
            self._open.remove(follow)
        self._reader.call(lambda: self._end(follow))

    @property
    def failed(self) -> bool:
        """Whether reading has ended by an error; a new follower can be made."""
        return self._reader.failure is not None

    def check(self) -> None:
        """Raises InternalError when reading has ended."""
        if self._stopped:
            raise InternalError("the client is closed")
        if self._reader.failure is not None:
            raise InternalError(f"following has failed: {self._reader.failure}")

    def stop(self) -> None:
        """End the thread and leave the broker. Who waits is woken, to find out."""
        self._stopped = True
        self._reader.stop()
        with self._lock:
            waiting = list(self._open)
        for follow in waiting:
            follow.wake()

    def _begin(self, follow: Follow, begin: Mapping[TP, int]) -> None:
        self._by_key.setdefault(follow.key, []).append(follow)
        for tp in begin:
            self._watchers[tp] = self._watchers.get(tp, 0) + 1
        self._read_from(begin)

    def _resume(self, follow: Follow) -> None:
        if follow in self._by_key.get(follow.key, ()) and follow.parked:
            self._read_from(follow.resume())

    def _end(self, follow: Follow) -> None:
        rest = [other for other in self._by_key.pop(follow.key, []) if other is not follow]
        if rest:
            self._by_key[follow.key] = rest
        for tp in follow.resume():
            self._watchers[tp] -= 1
            if not self._watchers[tp]:
                del self._watchers[tp]
                self._reader.drop(tp)

    def _read_from(self, offsets: Mapping[TP, int]) -> None:
        positions = self._reader.positions()
        for tp, offset in offsets.items():
            if tp not in positions or positions[tp] > offset:
                self._reader.seek(tp, offset)

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        for message in messages:
            if message.key is not None:
                for follow in self._by_key.get(message.key, ()):
                    follow.offer(message)
