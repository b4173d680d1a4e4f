"""The second consumer of a client's follows: it reads what lies far behind the first, and hands over at the end.

It goes in passes over a partition: a pass begins at the oldest record that somebody wants, and goes to what was the
end when it began. Who comes meanwhile and wants newer records joins it; who wants older ones waits for the next pass.
So nobody waits for more than two passes, however many come.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaError, TopicPartition

from penstock.common import admin
from penstock.common.reader import RawMessage, make_consumer, raw_message
from penstock.common.settings import KafkaSettings
from penstock.producers.follow import Follow
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

_PARTITION_EOF = KafkaError._PARTITION_EOF  # pyright: ignore[reportPrivateUsage]
_BATCH_RECORDS = 500
_AGAIN_S = 0.5
"""After so long a broker that did not answer is asked again."""


@dataclass(kw_only=True, slots=True)
class Pass:
    """One pass over a partition: from `position`, what is read next, to `goal`."""

    position: int
    goal: int
    follows: dict[bytes, list[Follow]] = field(default_factory=dict[bytes, list[Follow]])

    def join(self, follow: Follow) -> None:
        self.follows.setdefault(follow.key, []).append(follow)

    def give(self, message: RawMessage) -> list[Follow]:
        """Offer a record to those who follow its key. Those that have no room leave, and are returned."""
        self.position = message.offset + 1
        followers = self.follows.get(message.key or b"")
        if followers is None:
            return []
        parked = [follow for follow in followers if not follow.offer(message)]
        for follow in parked:
            self.leave(follow)
        return parked

    def leave(self, follow: Follow) -> None:
        followers = self.follows[follow.key]
        followers.remove(follow)
        if not followers:
            del self.follows[follow.key]

    def all(self) -> list[Follow]:
        return [follow for followers in self.follows.values() for follow in followers]


class CatchUp:
    """Reads for the follows that are added, on a thread that the first one starts.

    Each is told of once by `done` (follow, partition), on that thread: all up to the end was read, or it had no room.
    Those that were closed meanwhile are not told of.
    """

    def __init__(self, settings: KafkaSettings, done: Callable[[Follow, TP], None]) -> None:
        self._settings = settings
        self._done = done
        self._changed = threading.Condition()
        self._waiting: list[tuple[Follow, TP]] = []
        self._passes: dict[TP, Pass] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.failure: BaseException | None = None

    def add(self, follow: Follow, tp: TP) -> None:
        """Read this partition for it, from `follow.next(tp)` on. Returns at once; not twice before `done`."""
        with self._changed:
            self._waiting.append((follow, tp))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_forever, name="penstock-catch-up", daemon=True)
                self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread and leave the broker."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _read_forever(self) -> None:
        try:
            consumer = make_consumer(self._settings, fetch_wait_ms=10)
            try:
                self._go_on(consumer)
            finally:
                consumer.close()
        except BaseException as error:
            logger.exception("catch_up.failed")
            self.failure = error

    def _go_on(self, consumer: Consumer) -> None:
        while not self._stopping:
            broker_away = not self._take_in(consumer)
            if self._passes:
                self._read_batch(consumer)
                self._let_go(consumer)
                continue
            with self._changed:
                if not self._stopping and (broker_away or not self._waiting):
                    self._changed.wait(_AGAIN_S if broker_away else None)

    def _take_in(self, consumer: Consumer) -> bool:
        """Those who wait join the pass over their partition, or wait for it to end, or begin one.

        False when the broker did not answer: those who wanted to begin one wait on.
        """
        with self._changed:
            waiting, self._waiting = [entry for entry in self._waiting if not entry[0].closed], []
        fresh: dict[TP, list[Follow]] = {}
        for follow, tp in waiting:
            if tp not in self._passes:
                fresh.setdefault(tp, []).append(follow)
            elif follow.next(tp) >= self._passes[tp].position:
                self._passes[tp].join(follow)
            else:
                self._wait_again(follow, tp)
        if not fresh:
            return True
        try:
            goals = admin.end_offsets(self._settings, fresh)
        except BrokerUnavailable as error:
            logger.warning("catch_up.waits error=%s", error)
            for tp, follows in fresh.items():
                for follow in follows:
                    self._wait_again(follow, tp)
            return False
        for tp, follows in fresh.items():
            begin = min(follow.next(tp) for follow in follows)
            self._passes[tp] = made = Pass(position=begin, goal=goals[tp])
            for follow in follows:
                made.join(follow)
        consumer.incremental_assign([TopicPartition(*tp, self._passes[tp].position) for tp in fresh])
        return True

    def _wait_again(self, follow: Follow, tp: TP) -> None:
        with self._changed:
            self._waiting.append((follow, tp))

    def _read_batch(self, consumer: Consumer) -> None:
        # consume() alone would wait until its whole batch is full or the time is over.
        first = consumer.poll(0.05)
        if first is None:
            return
        for message in [first, *consumer.consume(_BATCH_RECORDS - 1, 0)]:
            tp = (message.topic() or "", message.partition() or 0)
            if (going := self._passes.get(tp)) is None:
                continue
            error = message.error()
            if error is None:
                for follow in going.give(raw_message(message)):
                    self._done(follow, tp)
            elif error.code() == _PARTITION_EOF:
                # Behind the last record there may be offsets that compaction emptied: the end is reached all the same.
                going.position = going.goal = max(going.position, message.offset() or 0)
            else:
                logger.warning("catch_up.error topic=%s error=%s", tp[0], error)

    def _let_go(self, consumer: Consumer) -> None:
        """End the passes that are through, or that nobody needs any more."""
        for tp, going in list(self._passes.items()):
            for follow in going.all():
                if follow.closed:
                    going.leave(follow)
            if going.follows and going.position < going.goal:
                continue
            for follow in going.all():
                follow.pass_to(tp, going.position)
                self._done(follow, tp)
            del self._passes[tp]
            consumer.incremental_unassign([TopicPartition(*tp)])
