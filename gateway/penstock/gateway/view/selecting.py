"""Which records a view gets: those that change nothing are passed over, undecoded. On the reader's thread.

These are the statuses of requests that have ended, and the pieces of streams that nobody follows here. Of the pieces of
one (epoch, attempt) of a request only the first changes what a view knows: older ones are not heard from then on. So
the first goes on, and those are passed over that agree with it in request, tenant, kind, origin, attempt and epoch.
They are read again by offset when a client comes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from enum import Enum, auto
from typing import Any

from confluent_kafka import Message

from penstock.common.reader import Headers, RawMessage, raw_message
from penstock.schemas.codec import Codec
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import ResultEvent, StatusEvent
from penstock.schemas.topics import TP, TopicNames

MAX_STREAMS = 200_000
"""Streams whose first bytes are remembered. Of one that was forgotten the view gets a piece once more."""


UNFOLLOWED_STREAM: Headers = (("", None),)
"""Marks a first piece that was delivered while nobody followed its stream."""


class Fate(Enum):
    """What becomes of a record of the result topic."""

    DELIVERED = auto()
    FIRST_OF_UNFOLLOWED_STREAM = auto()
    """Delivered, as the first piece of a stream that nobody follows: those behind it may be passed over."""
    PASSED_OVER = auto()


class StreamPieces:
    """Knows the first bytes of each stream's pieces; `followed`: the keys of requests that somebody follows. Pure."""

    def __init__(self, codec: Codec, followed: Container[bytes], most: int = MAX_STREAMS) -> None:
        head = codec.head(ResultEvent, "request_id", "tenant", "kind", "origin", "attempt", "epoch")
        self._head: Callable[[bytes], tuple[Any, ...]] = head
        self._followed = followed
        self._most = most
        self._first_bytes: dict[bytes, bytes] = {}

    def fate(self, key: bytes | None, value: bytes | None) -> Fate:
        """What becomes of a record of the result topic."""
        if key is None or value is None:
            return Fate.DELIVERED
        first_bytes = self._first_bytes.get(key)
        if first_bytes is not None and value.startswith(first_bytes):
            return Fate.DELIVERED if key in self._followed else Fate.PASSED_OVER
        is_piece = self._note(key, value)
        return Fate.FIRST_OF_UNFOLLOWED_STREAM if is_piece and key not in self._followed else Fate.DELIVERED

    def _note(self, key: bytes, value: bytes) -> bool:
        """Whether it is a piece of a stream."""
        try:
            *_, kind, _, _, _, length = self._head(value)
        except PenstockError:
            return False  # nobody's stream, or its schema is still to be asked for: the view decides
        self._first_bytes.pop(key, None)
        if kind != "chunk":
            return False
        if len(self._first_bytes) >= self._most:
            del self._first_bytes[next(iter(self._first_bytes))]
        self._first_bytes[key] = value[:length]
        return True


def fate_of_status(codec: Codec) -> Callable[[bytes | None, bytes | None], Fate]:
    """What becomes of a record of the status topic: one that says the end is passed over."""
    head = codec.head(StatusEvent, "done")

    def fate(_: bytes | None, value: bytes | None) -> Fate:
        try:
            return Fate.PASSED_OVER if value is not None and head(value)[0] else Fate.DELIVERED
        except PenstockError:
            return Fate.DELIVERED

    return fate


class Selection:
    """What goes on of some messages: all of each, without headers where nobody reads them."""

    def __init__(
        self, names: TopicNames, without_headers: Container[str], codec: Codec, followed: Container[bytes]
    ) -> None:
        self.read = 0
        """How many records of requests, statuses and results came."""
        not_of_requests = {names.model, names.worker, names.conversation_facts, names.idempotency, names.usage}
        self._uncounted = {names.control, *not_of_requests}
        self._without_headers = without_headers
        self._fates = {names.result: StreamPieces(codec, followed).fate, names.status: fate_of_status(codec)}

    def __call__(self, messages: Sequence[Message]) -> list[RawMessage]:
        """A first piece that is delivered alone has `UNFOLLOWED_STREAM` in place of its headers.

        The last record of a partition that is passed over comes without key and value, so that positions go on.
        """
        selected: list[RawMessage] = []
        passed: dict[TP, Message] = {}
        for message in messages:
            topic = message.topic() or ""
            self.read += topic not in self._uncounted
            fate_of = self._fates.get(topic)
            fate = Fate.DELIVERED if fate_of is None else fate_of(message.key(), message.value())
            if fate is Fate.PASSED_OVER:
                passed[topic, message.partition() or 0] = message
                continue
            if passed:
                passed.pop((topic, message.partition() or 0), None)
            record = raw_message(message, self._without_headers)
            if fate is Fate.FIRST_OF_UNFOLLOWED_STREAM:
                record.headers = UNFOLLOWED_STREAM
            selected.append(record)
        return selected + [_without_value(message) for message in passed.values()]


def _without_value(message: Message) -> RawMessage:
    return RawMessage(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        message.timestamp()[1],
        None,
        None,
    )
