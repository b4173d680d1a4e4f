"""Which records a view is told of: what tells it nothing is passed over, undecoded. On the reader's thread.

These are the statuses of requests that have ended, and the pieces of streams that nobody follows here. Of the pieces of
one (epoch, attempt) of a request only the first changes what a view knows: older ones are not heard from then on. So
the first goes on, and those that agree with it in all that decides are passed over. They are read again by offset when
a client comes.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

from confluent_kafka import Message

from penstock.common.reader import RawMessage, raw_message
from penstock.schemas.codec import Codec
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import ResultEvent, StatusEvent
from penstock.schemas.topics import TP, TopicNames

MAX_STREAMS = 200_000
"""Streams of which the beginning of their pieces is remembered: the oldest are told of once more."""


class StreamPieces:
    """Knows how the pieces of each stream begin. `followed` has the keys of requests that somebody follows. Pure."""

    def __init__(self, codec: Codec, followed: Container[bytes], most: int = MAX_STREAMS) -> None:
        head = codec.head(ResultEvent, "request_id", "tenant", "kind", "origin", "attempt", "epoch")
        self._head: Callable[[bytes], tuple[Any, ...]] = head
        self._followed = followed
        self._most = most
        self._beginnings: dict[bytes, bytes] = {}

    def passes_over(self, key: bytes | None, value: bytes | None) -> bool:
        """Whether a record of the result topic says nothing to anybody here."""
        if key is None or value is None:
            return False
        beginning = self._beginnings.get(key)
        if beginning is not None and value.startswith(beginning):
            return key not in self._followed
        self._note(key, value)
        return False

    def _note(self, key: bytes, value: bytes) -> None:
        try:
            *_, kind, _, _, _, length = self._head(value)
        except PenstockError:
            return  # nobody's stream, or its schema is still to be asked for: the view decides
        self._beginnings.pop(key, None)
        if kind == "chunk":
            if len(self._beginnings) >= self._most:
                del self._beginnings[next(iter(self._beginnings))]
            self._beginnings[key] = value[:length]


def last_statuses(codec: Codec) -> Callable[[bytes | None, bytes | None], bool]:
    """Whether a record of the status topic says that its request has ended."""
    head = codec.head(StatusEvent, "done")

    def passes_over(_: bytes | None, value: bytes | None) -> bool:
        try:
            return value is not None and head(value)[0]
        except PenstockError:
            return False

    return passes_over


class Selection:
    """What goes on of some messages: all of each, without headers where nobody reads them."""

    def __init__(
        self, names: TopicNames, without_headers: Container[str], codec: Codec, followed: Container[bytes]
    ) -> None:
        self.read = 0
        """How many records of requests, statuses and results came."""
        self._uncounted = {names.control, names.model, names.worker}
        self._without_headers = without_headers
        self._passes_over = {
            names.result: StreamPieces(codec, followed).passes_over,
            names.status: last_statuses(codec),
        }

    def __call__(self, messages: Sequence[Message]) -> list[RawMessage]:
        """The last record that is passed over comes without key and value, so that positions go on."""
        selected: list[RawMessage] = []
        passed: dict[TP, Message] = {}
        for message in messages:
            topic = message.topic() or ""
            self.read += topic not in self._uncounted
            passes_over = self._passes_over.get(topic)
            if passes_over is not None:
                if passes_over(message.key(), message.value()):
                    passed[topic, message.partition() or 0] = message
                    continue
                if passed:
                    passed.pop((topic, message.partition() or 0), None)
            selected.append(raw_message(message, self._without_headers))
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
