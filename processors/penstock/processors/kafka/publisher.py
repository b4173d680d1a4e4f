"""What the worker says on Kafka: results, statuses and dead letters, each acknowledged by the broker or tried again.

All runs on the event loop. A record that the broker will never take (too large) becomes a small failed event; a broker
that is away only delays: the record stays here, in order, until it is taken.

While nothing is under way a record leaves at once. While something is, records gather for a moment and leave together:
a producer that sends each by itself costs several times as much (Nagle's rule). Dead letters have a window of their
own, so that a flood of poison delays nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from penstock.common.kafka_errors import too_large
from penstock.common.transport import Delivery, record_bytes
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BadAvro, InternalError, PenstockError, TooLarge, to_error_record
from penstock.schemas.records import PAYLOAD_FIELDS, DeadLetter, ResultEvent, StatusEvent
from penstock.schemas.topics import TopicNames

logger = logging.getLogger(__name__)

GATHER_S = 0.002
"""How long a record waits for others at most while something is under way."""
GATHERED_RECORDS = 64
"""So many leave together without waiting longer."""
LETTER_WINDOW = 64
"""Dead letters under way at once."""

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
    """One record under way. When it is too large `substitute` makes what stands in for it, or `refused` is told."""

    topic: str
    value: bytes | None
    key: bytes | None
    must: bool
    done: Done | None = None
    substitute: Substitute | None = None
    headers: Headers | None = None
    partition: int | None = None
    refused: Refused | None = None


class Publisher:
    """Encodes and sends. `backlog` counts what is gathered or was refused by the local queue and must still go out.

    Without a `loop` nothing is gathered.
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
    ) -> None:
        self._transport = transport
        self._codec = codec
        self._loop = loop
        self._max_record_bytes = max_record_bytes
        self._on_answer = on_answer
        self._result, self._status, self._dlq = names.result, names.status, names.dlq
        self._gathered: list[_Outgoing] = []
        self._flush_due: asyncio.TimerHandle | None = None
        self._waiting: deque[_Outgoing] = deque()
        self._letters: deque[tuple[DeadLetter, Done]] = deque()
        self._letters_under_way = 0
        self.unacknowledged = 0

    @property
    def backlog(self) -> int:
        return len(self._waiting) + len(self._gathered) + len(self._letters)

    def chunk(self, event: ResultEvent, done: Done | None = None, *, headers: Headers | None = None) -> None:
        """Publish a piece of a stream. Raises BadAvro, TooLarge for one that can never be published."""
        value, key = self._codec.encode(event), event.request_id.encode()
        size_bytes = record_bytes(value, key, headers)
        if size_bytes > self._max_record_bytes:
            raise too_large(self._result, size_bytes, self._max_record_bytes)
        self._send(_Outgoing(self._result, value, key, must=True, done=done, headers=headers))

    def result(
        self, event: ResultEvent, done: Callable[[PenstockError | None], None], *, headers: Headers | None = None
    ) -> None:
        """Publish the terminal event; `done` runs after the broker acknowledged it.

        What can never be published is replaced by a small failed event, whose error `done` is told.
        """
        failure: PenstockError | None = None

        def substitute(error: PenstockError) -> bytes:
            nonlocal failure
            failure = error
            return self._encode_failure(event, error)

        try:
            value = self._codec.encode(event)
        except BadAvro as error:  # e.g. a lone surrogate in an engine's text
            logger.error("publish.unencodable request=%s error=%s", event.request_id, error)
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
            logger.error("publish.unencodable request=%s error=%s", event.request_id, error)
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

    # -- gathering

    def _send(self, outgoing: _Outgoing) -> None:
        if self._loop is None or (self.unacknowledged == 0 and not self._gathered and not self._waiting):
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
        for _ in range(len(self._waiting)):
            if not self._offer(self._waiting[0]):
                break
            self._waiting.popleft()
        gathered, self._gathered = self._gathered, []
        for outgoing in gathered:
            self._send_now(outgoing)

    def _send_now(self, outgoing: _Outgoing) -> None:
        """Offer it, behind what waits: the events of one request keep their order."""
        if (self._waiting or not self._offer(outgoing)) and outgoing.must:
            self._waiting.append(outgoing)

    # -- offering

    def _offer(self, outgoing: _Outgoing) -> bool:
        """True when the transport took it, or when nothing can make it take it. Never raises."""
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
            return self._offer(outgoing) if self._make_smaller(outgoing, error) else True
        except PenstockError as error:
            logger.warning("publish.refused topic=%s error=%s", outgoing.topic, error.code)
            return False
        self.unacknowledged += 1
        return True

    def _delivered(self, outgoing: _Outgoing, delivery: Delivery) -> None:
        self.unacknowledged -= 1
        error = delivery.error
        if error is None:
            if self._on_answer is not None:
                self._on_answer()
            if outgoing.done is not None:
                outgoing.done()
        else:
            self._failed(outgoing, error)
        if self.unacknowledged == 0 and self._gathered:
            self._flush()

    def _failed(self, outgoing: _Outgoing, error: PenstockError) -> None:
        logger.warning("publish.failed topic=%s error=%s %s", outgoing.topic, error.code, error)
        if isinstance(error, TooLarge):
            if self._make_smaller(outgoing, error):
                self._send_now(outgoing)
        elif outgoing.must:
            self._waiting.append(outgoing)

    def _make_smaller(self, outgoing: _Outgoing, error: PenstockError) -> bool:
        if outgoing.refused is not None:
            outgoing.refused(error)
            return False
        if outgoing.substitute is None:
            # Nothing can stand in for it: the offset stays uncommitted and the watchdog will say so.
            logger.error("publish.impossible topic=%s error=%s", outgoing.topic, error)
            return False
        outgoing.value = outgoing.substitute(error)
        outgoing.substitute = None
        return True

    def _encode_failure(self, event: ResultEvent, error: PenstockError) -> bytes:
        try:
            return self._codec.encode(small_failure(event, error))
        except BadAvro:  # the error's own words cannot be encoded
            return self._codec.encode(small_failure(event, InternalError("the output cannot be published")))

    # -- dead letters

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
                reason=reason.encode(errors="replace").decode(),
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
