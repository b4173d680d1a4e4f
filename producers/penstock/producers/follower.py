"""One consumer for all follows of a client: it reads the partitions that somebody waits on, each record once.

A follow begins at an offset from before its request was produced, so the reading may have to go back a little; what
others have seen already they ignore by offset. A follow that needs records far behind (its request is old, or its
buffer was full for long) is caught up by a second consumer first (`catchup`), so that it holds up nobody.

A follow whose buffer is full is parked: the records stay in Kafka, and it goes back for them when it was emptied. So
nothing is lost and nothing grows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

from penstock.common.forking import keep_in_children
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.producers.catchup import CatchUp
from penstock.producers.follow import Follow
from penstock.schemas.errors import InternalError, Overloaded
from penstock.schemas.topics import TP

BUFFER_RECORDS = 256
"""Records that one follow holds until they are taken."""
BACK_RECORDS = 200
"""So far back the shared reader goes for one follow; reading so many again delays the others by some milliseconds."""
AHEAD_RECORDS = 10_000
"""When a new follow begins so far ahead of the shared reader, those who wait for older records are caught up apart."""


class Follower:
    """Follows keys on partitions with one PartitionReader, whose thread alone touches the registry below."""

    def __init__(self, settings: KafkaSettings, *, max_follows: int) -> None:
        self._max_follows = max_follows
        # Partitions come and go with the follows: short waits, so that a new one is not held up by an open fetch.
        self._reader = PartitionReader(
            settings, {}, self._on_batch, fetch_wait_ms=10, poll_s=0.01, name="penstock-follower"
        )
        self._catch_up = CatchUp(settings, self._caught_up)
        self._reader.start()
        self._lock = threading.Lock()
        self._open: set[Follow] = set()
        self._stopped = False
        self._pid = os.getpid()
        keep_in_children(self)
        self._live: dict[TP, dict[bytes, list[Follow]]] = {}
        self._behind: set[tuple[Follow, TP]] = set()

    def positions(self) -> dict[TP, int]:
        """How far the partitions that are read now have been read."""
        return self._reader.positions()

    def open(self, key: bytes, begin: Mapping[TP, int], on_ready: Callable[[], None]) -> Follow:
        """Begin to follow `key` on these partitions from these offsets. Raises Overloaded beyond `max_follows`."""
        self.check()
        follow = Follow(key, begin, BUFFER_RECORDS, on_ready)
        with self._lock:
            if len(self._open) >= self._max_follows:
                raise Overloaded(f"this client follows {self._max_follows} requests already", retry_after_s=1.0)
            self._open.add(follow)
        self._reader.call(lambda: self._place(follow, begin))
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
        follow.closed = True
        self._reader.call(lambda: self._end(follow))

    @property
    def failed(self) -> bool:
        """Whether reading has ended by an error; a new follower can be made."""
        return self._failure is not None

    @property
    def _failure(self) -> BaseException | None:
        return self._reader.failure or self._catch_up.failure

    def check(self) -> None:
        """Raises InternalError when reading has ended."""
        if self._pid != os.getpid():
            raise InternalError("this client was made before fork(): make one in each process")
        if self._failure is not None:  # such a one is stopped as well, though the client goes on
            raise InternalError(f"following has failed: {self._failure}")
        if self._stopped:
            raise InternalError("the client is closed")

    def stop(self) -> None:
        """End the threads and leave the broker. Who waits is woken, to find out."""
        if self._pid != os.getpid():
            return
        self._stopped = True
        self._reader.stop()
        self._catch_up.stop()
        with self._lock:
            waiting = list(self._open)
        for follow in waiting:
            follow.wake()

    # -- on the reader's thread

    def _place(self, follow: Follow, offsets: Mapping[TP, int]) -> None:
        """Read each of these partitions for it: by the shared reader, or apart when that has gone far beyond."""
        for tp, offset in offsets.items():
            if follow.closed or (follow, tp) in self._behind:
                continue
            position = self._reader.positions().get(tp)
            if position is not None and position - offset > BACK_RECORDS:
                self._leave(follow, tp)
                self._read_apart(follow, tp)
                continue
            if position is not None and offset - position > AHEAD_RECORDS:
                self._read_all_apart(tp, position)
                position = None
            if position is None or position > offset:
                self._reader.seek(tp, offset)
            self._join(follow, tp)

    def _read_all_apart(self, tp: TP, position: int) -> None:
        for follow in [follow for follows in self._live.pop(tp, {}).values() for follow in follows]:
            follow.pass_to(tp, position)
            self._read_apart(follow, tp)

    def _read_apart(self, follow: Follow, tp: TP) -> None:
        self._behind.add((follow, tp))
        self._catch_up.add(follow, tp)

    def _caught_up(self, follow: Follow, tp: TP) -> None:
        """Called by the second consumer, on its thread, when it has read to the end, or the follow has no room."""
        self._reader.call(lambda: self._come_back(follow, tp))

    def _come_back(self, follow: Follow, tp: TP) -> None:
        self._behind.discard((follow, tp))
        if not follow.parked:  # one that is parked is placed when it was emptied
            self._place(follow, {tp: follow.next(tp)})

    def _resume(self, follow: Follow) -> None:
        if follow.parked and not follow.closed:
            self._place(follow, follow.resume())

    def _end(self, follow: Follow) -> None:
        for tp in follow.resume():
            self._leave(follow, tp)
            self._behind.discard((follow, tp))

    def _join(self, follow: Follow, tp: TP) -> None:
        follows = self._live.setdefault(tp, {}).setdefault(follow.key, [])
        if follow not in follows:
            follows.append(follow)

    def _leave(self, follow: Follow, tp: TP) -> None:
        by_key = self._live.get(tp, {})
        if follow not in by_key.get(follow.key, ()):
            return
        by_key[follow.key].remove(follow)
        if not by_key[follow.key]:
            del by_key[follow.key]
        if not by_key:
            del self._live[tp]
            self._reader.drop(tp)

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        for message in messages:
            if message.key is not None:
                by_key = self._live.get((message.topic, message.partition), {})
                for follow in by_key.get(message.key, ()):
                    follow.offer(message)
