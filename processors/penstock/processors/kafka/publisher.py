"""Publishes results, statuses and dead letters; each record is acknowledged by the broker or sent again.

All runs on the event loop. A record that the broker will never take (too large) becomes a small failed event. A record
that the broker refuses for another reason is sent again every `AGAIN_S`, before later records of its key, and `trouble`
says so: also one for a partition that is gone. Where this client may not write to a topic, or the topic is missing, one
record asks again for all of them. Advice and facts about this worker are dropped meanwhile.

While nothing is under way a record leaves at once. While something is, records gather for a moment and leave together:
a producer that sends each by itself costs several times as much (Nagle's rule). Dead letters have a window of their
own, so that a flood of poison delays nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from penstock.common.kafka_errors import too_large
from penstock.common.transport import Delivery, record_bytes
from penstock.schemas.codec import Codec
from penstock.schemas.errors import (
    BadAvro,
    Forbidden,
    InternalError,
    NotFound,
    Overloaded,
    PenstockError,
    TooLarge,
    to_error_record,
)
from penstock.schemas.records import PAYLOAD_FIELDS, DeadLetter, ResultEvent, StatusEvent
from penstock.schemas.texts import encodable
from penstock.schemas.topics import TopicNames

logger = logging.getLogger(__name__)

GATHER_S = 0.002
"""How long a record waits for others at most while something is under way."""
GATHERED_RECORDS = 64
"""How many leave together without waiting longer."""
LETTER_WINDOW = 64
"""Dead letters under way at once."""
AGAIN_S = 1.0
"""Between two attempts to send what the broker refused."""
REPEATED_S = 60.0
"""Between two log lines about one topic that this client may not write to."""
UNASKED_S = 30.0
"""A closed topic that nothing was written to for so long, and for which nothing waits, is not named in `trouble`."""
UNANSWERED_S = 10.0
"""`trouble` names records without an acknowledgement after this time."""
CHUNK_OVERHEAD_BYTES = 1024
"""Memory of a chunk on its way, besides its record."""

Done = Callable[[], None]
Headers = Sequence[tuple[str, bytes | None]]
Substitute = Callable[[PenstockError], bytes]
Refused = Callable[[PenstockError], None]


class Sending(Protocol):
    """The part of AsyncTransport that publishing needs; tests give a fake."""

    def produce_nowait(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        callback: Callable[[Delivery], None] | None = None,
    ) -> None: ...


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A record without an acknowledgement. If it is too large, `substitute` or `refused` is called."""

    topic: str
    value: bytes | None
    key: bytes | None
    must: bool
    done: Done | None = None
    substitute: Substitute | None = None
    headers: Headers | None = None
    partition: int | None = None
    refused: Refused | None = None
    chunk_bytes: int = 0
    number: int = 0
    """The place in the order of publishing."""
    sent_at: float = 0.0

    @property
    def line(self) -> tuple[str, bytes | None]:
        """Records of one line keep their order."""
        return self.topic, self.key


@dataclass(slots=True)
class _ClosedTopic:
    """A topic to which nothing can be written until an operator grants the right or creates it."""

    error: PenstockError
    logged_at: float
    again_at: float = 0.0
    probe: _Outgoing | None = None
    """The record that was sent to learn whether it is open again."""


class Publisher:
    """Encodes and sends. `backlog` counts the records that the producer does not have and that must still be sent.

    `acknowledged` counts the records that Kafka has taken.
    `chunk_bytes`: memory of pieces of streams without an acknowledgement. Without a `loop` nothing is gathered.
    """

    def __init__(
        self,
        transport: Sending,
        codec: Codec,
        names: TopicNames,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        max_record_bytes: int = 1_000_000,
        on_answer: Done | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._codec = codec
        self._loop = loop
        self._max_record_bytes = max_record_bytes
        self._on_answer = on_answer
        self._clock = clock
        self._result, self._status, self._dlq = names.result, names.status, names.dlq
        self._gathered: list[_Outgoing] = []
        self._flush_due: asyncio.TimerHandle | None = None
        self._waiting: deque[_Outgoing] = deque()
        """Refused by the local queue."""
        self._failed: list[_Outgoing] = []
        """Refused by the broker, and what was published later on the same lines."""
        self._failed_lines: set[tuple[str, bytes | None]] = set()
        self._failure: PenstockError | None = None
        self._closed: dict[str, _ClosedTopic] = {}
        self._again_at = 0.0
        self._numbers = itertools.count()
        self._letters: deque[tuple[DeadLetter, Done]] = deque()
        self._letters_under_way = 0
        self._under_way: dict[_Outgoing, None] = {}
        self.acknowledged = 0
        self.chunk_bytes = 0

    @property
    def unacknowledged(self) -> int:
        return len(self._under_way)

    @property
    def backlog(self) -> int:
        return len(self._waiting) + len(self._failed) + len(self._gathered) + len(self._letters)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest record that the producer has and Kafka has not acknowledged."""
        return self._clock() - next(iter(self._under_way)).sent_at if self._under_way else 0.0

    @property
    def trouble(self) -> str | None:
        """Why records wait; None while Kafka takes them."""
        closed = self._closed_now()
        if self._failed or closed:
            why = "; ".join(str(topic.error) for topic in closed) or self._failure
            return f"Kafka refuses {len(self._failed)} records, which are sent again: {why}"
        if self._waiting:
            return f"{len(self._waiting)} records wait: the local queue to Kafka is full"
        if self.oldest_s >= UNANSWERED_S:
            return f"Kafka has not acknowledged {self.unacknowledged} records, the oldest for {self.oldest_s:.0f} s"
        return None

    def _closed_now(self) -> list[_ClosedTopic]:
        """The closed topics, but for those that may be open again: only dropped records asked, and none lately."""
        if not self._closed:
            return []
        held_back, now = {outgoing.topic for outgoing in self._failed}, self._clock()
        return [
            closed for topic, closed in self._closed.items() if topic in held_back or now < closed.again_at + UNASKED_S
        ]

    def chunk(
        self,
        event: ResultEvent,
        done: Done | None = None,
        *,
        refused: Refused,
        headers: Headers | None = None,
    ) -> None:
        """Publish a piece of a stream; `refused` is called, at once or later, for one that can never be published."""
        key = event.request_id.encode()
        try:
            value = self._codec.encode(event)
        except BadAvro as error:
            refused(error)
            return
        size_bytes = record_bytes(value, key, headers)
        if size_bytes > self._max_record_bytes:
            refused(too_large(self._result, size_bytes, self._max_record_bytes))
            return
        held_bytes = size_bytes + CHUNK_OVERHEAD_BYTES
        self.chunk_bytes += held_bytes
        outgoing = _Outgoing(self._result, value, key, must=True, done=done, headers=headers, refused=refused)
        outgoing.chunk_bytes = held_bytes
        self._send(outgoing)

    def result(
        self, event: ResultEvent, done: Callable[[PenstockError | None], None], *, headers: Headers | None = None
    ) -> None:
        """Publish the terminal event; `done` runs after the broker acknowledged it.

        What can never be published is replaced by a small failed event, whose error `done` gets.
        """
        failure: PenstockError | None = None

        def substitute(error: PenstockError) -> bytes:
            nonlocal failure
            failure = error
            return self._codec.encode(small_failure(event, error))

        try:
            value = self._codec.encode(event)
        except BadAvro as error:  # e.g. a lone surrogate in an engine's text
            logger.error("publish.unencodable request_id=%s error=%s", event.request_id, error)
            value = substitute(InternalError("the output cannot be encoded"))
        key = event.request_id.encode()
        self._send(
            _Outgoing(
                self._result,
                value,
                key,
                must=True,
                done=lambda: done(failure),
                substitute=substitute,
                headers=headers,
            )
        )

    def status(self, event: StatusEvent, *, headers: Headers | None = None) -> None:
        """Publish a status. It is advice, and dropped when it cannot be sent now; one that ends a request never is."""

        def bare(_error: PenstockError) -> bytes:
            return self._codec.encode(replace(event, detail=None))

        try:
            value = self._codec.encode(event)
        except BadAvro as error:
            logger.error("publish.unencodable request_id=%s error=%s", event.request_id, error)
            value = bare(error)
        key = event.request_id.encode()
        substitute = bare if event.done else None
        self._send(_Outgoing(self._status, value, key, must=event.done, substitute=substitute, headers=headers))

    def dead_letter(self, letter: DeadLetter, done: Done) -> None:
        """Publish a dead letter; when even that is too large, the same with the first bytes of the original only."""
        self._letters.append((letter, done))
        self._send_letters()

    def republish(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None,
        headers: Headers,
        partition: int | None,
        done: Done,
        refused: Refused,
    ) -> None:
        """Put a request where it belongs; `refused` when it is too large for that."""
        self._send(
            _Outgoing(topic, value, key, must=True, done=done, headers=headers, partition=partition, refused=refused)
        )

    def record(self, topic: str, key: str, record: Any) -> None:
        """Publish a fact about this worker (state, model); the latest wins, so a lost one does not matter.

        None is a tombstone: the fact is no more.
        """
        value = None if record is None else self._codec.encode(record)
        self._send(_Outgoing(topic, value, key.encode(), must=False))

    def tick(self) -> None:
        """Send what has gathered, and offer again what the local queue refused."""
        self._flush()
        self._send_letters()

    def _send(self, outgoing: _Outgoing) -> None:
        outgoing.number = next(self._numbers)
        if self._loop is None or not (self._under_way or self._gathered or self._waiting):
            self._send_now(outgoing)
            return
        self._gathered.append(outgoing)
        if len(self._gathered) >= GATHERED_RECORDS:
            self._flush()
        elif self._flush_due is None:
            self._flush_due = self._loop.call_later(GATHER_S, self._flush)

    def _flush(self) -> None:
        if self._flush_due is not None:
            self._flush_due.cancel()
            self._flush_due = None
        while self._waiting:
            outgoing = self._waiting[0]
            if self._is_held_back(outgoing):
                self._hold_back(outgoing)
            elif not self._offer(outgoing):
                break
            self._waiting.popleft()
        if self._failed and not self._waiting and self._clock() >= self._again_at:
            again, self._failed = sorted(self._failed, key=lambda one: one.number), []
            self._failed_lines.clear()
            self._again_at = self._clock() + AGAIN_S
            for outgoing in again:
                self._send_now(outgoing)
        gathered, self._gathered = self._gathered, []
        for outgoing in gathered:
            self._send_now(outgoing)

    def _send_now(self, outgoing: _Outgoing) -> None:
        """Offer it, behind what waits: the events of one request keep their order."""
        if self._is_held_back(outgoing):
            if outgoing.must:
                self._hold_back(outgoing)
        elif (self._waiting or not self._offer(outgoing)) and outgoing.must:
            self._waiting.append(outgoing)

    def _hold_back(self, outgoing: _Outgoing) -> None:
        """Later records of its key wait behind it, also when their topic is open again."""
        self._failed.append(outgoing)
        self._failed_lines.add(outgoing.line)

    def _is_held_back(self, outgoing: _Outgoing) -> bool:
        """Whether an earlier record of its key has failed, or its topic is closed and no new attempt is due."""
        if outgoing.must and outgoing.line in self._failed_lines:
            return True
        closed = self._closed.get(outgoing.topic)
        if closed is None:
            return False
        if closed.probe in self._under_way or self._clock() < closed.again_at:
            return True
        closed.probe = outgoing
        return False

    def _offer(self, outgoing: _Outgoing) -> bool:
        """False while the local queue refuses it. Never raises."""
        outgoing.sent_at = self._clock()
        self._under_way[outgoing] = None
        try:
            self._transport.produce_nowait(
                outgoing.topic,
                outgoing.value,
                key=outgoing.key,
                headers=outgoing.headers,
                partition=outgoing.partition,
                callback=partial(self._delivered, outgoing),
            )
        except TooLarge as error:
            del self._under_way[outgoing]
            return self._offer(outgoing) if self._make_smaller(outgoing, error) else True
        except Overloaded as error:
            del self._under_way[outgoing]
            if not self._waiting:
                logger.warning("publish.refused topic=%s error=%s", outgoing.topic, error.code)
            return False
        except PenstockError as error:
            del self._under_way[outgoing]
            self._fail(outgoing, error)
        return True

    def _delivered(self, outgoing: _Outgoing, delivery: Delivery) -> None:
        del self._under_way[outgoing]
        error = delivery.error
        if error is None:
            self.acknowledged += 1
            self.chunk_bytes -= outgoing.chunk_bytes
            self._open(outgoing)
            if self._on_answer is not None:
                self._on_answer()
            if outgoing.done is not None:
                outgoing.done()
        elif not isinstance(error, TooLarge):
            self._fail(outgoing, error)
        elif self._make_smaller(outgoing, error):
            self._send_now(outgoing)
        if not self._under_way and self._gathered:
            self._flush()

    def _fail(self, outgoing: _Outgoing, error: PenstockError) -> None:
        """The broker does not take it as it is: it is sent again later, if it must be published."""
        now = self._clock()
        partition_is_gone = isinstance(error, NotFound) and outgoing.partition is not None
        if isinstance(error, Forbidden | NotFound) and not partition_is_gone:
            self._close(outgoing.topic, error, now)
        elif not self._failed:
            logger.warning("publish.failed topic=%s error=%s %s", outgoing.topic, error.code, error)
        if not self._failed:
            self._again_at = now + AGAIN_S
        if outgoing.must:
            self._failure = error
            self._hold_back(outgoing)

    def _close(self, topic: str, error: PenstockError, now: float) -> None:
        closed = self._closed.get(topic)
        if closed is None or now - closed.logged_at >= REPEATED_S:
            logger.error("publish.topic_closed topic=%s error=%s %s", topic, error.code, error)
            closed = self._closed[topic] = _ClosedTopic(error, logged_at=now)
        closed.error, closed.again_at = error, now + AGAIN_S

    def _open(self, acknowledged: _Outgoing) -> None:
        """What waited for a topic is sent when the record that asked for it is acknowledged."""
        closed = self._closed.get(acknowledged.topic)
        if closed is not None and closed.probe is acknowledged:
            logger.warning("publish.topic_open topic=%s", acknowledged.topic)
            del self._closed[acknowledged.topic]
            self._again_at = 0.0
            self._flush()

    def _make_smaller(self, outgoing: _Outgoing, error: PenstockError) -> bool:
        """True when it has another value now."""
        if outgoing.refused is not None:
            self.chunk_bytes -= outgoing.chunk_bytes
            outgoing.refused(error)
            return False
        if outgoing.substitute is None:
            self._fail(outgoing, error)
            return False
        outgoing.value = outgoing.substitute(error)
        outgoing.substitute = None
        return True

    def _send_letters(self) -> None:
        while self._letters and self._letters_under_way < LETTER_WINDOW:
            letter, done = self._letters.popleft()
            self._letters_under_way += 1
            key = None if letter.request_id is None else letter.request_id.encode()
            cut = partial(self._encode_cut, letter)
            try:
                value = self._codec.encode(letter)
            except BadAvro as error:
                logger.error("publish.unencodable_letter origin=%s error=%s", letter.origin, error)
                value, cut = self._encode_cut(letter, error), None
            acknowledged = partial(self._letter_acknowledged, done)
            self._send(_Outgoing(self._dlq, value, key, must=True, done=acknowledged, substitute=cut))

    def _letter_acknowledged(self, done: Done) -> None:
        self._letters_under_way -= 1
        done()
        self._send_letters()

    def _encode_cut(self, letter: DeadLetter, _error: PenstockError) -> bytes:
        """The letter with the first bytes of the original only, in words that can be encoded."""
        reason = f"{letter.reason} (the original of {len(letter.original)} bytes is cut to its first 64 KiB)"
        return self._codec.encode(
            replace(
                letter,
                original=letter.original[: 1 << 16],
                original_key=None,
                original_headers={},
                reason=encodable(reason),
                error_chain=[encodable(one) for one in letter.error_chain],
            )
        )


def small_failure(event: ResultEvent, error: PenstockError) -> ResultEvent:
    """The failed event that stands in for one that the broker will never take."""
    return replace(
        event,
        kind="terminal",
        status="failed",
        text=None,
        token_ids=None,
        first_token_index=None,
        text_offset=None,
        tool_call_pieces=None,
        token_logprobs=None,
        first_logprob_index=None,
        cached_tokens=None,
        context=None,
        **dict.fromkeys(PAYLOAD_FIELDS),
        output_artifact=None,
        finish_reason=None,
        error=to_error_record(error),
        metadata={},
    )
