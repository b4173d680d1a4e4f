"""What the worker says on Kafka: results, statuses and dead letters, each acknowledged by the broker or tried again.

Callbacks run on the event loop. A record that the broker will never take (too large) becomes a small failed event; a
broker that is away only delays: the record stays here, in order, until it is taken.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.producers.transport import Delivery
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BadAvro, InternalError, PenstockError, TooLarge, to_error_record
from penstock.schemas.records import DeadLetter, ResultEvent, StatusEvent
from penstock.schemas.topics import TopicNames

logger = logging.getLogger(__name__)

Done = Callable[[], None]
Headers = list[tuple[str, bytes]]


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


@dataclass(slots=True, kw_only=True)
class _Outgoing:
    """One record under way; `substitute` makes what stands in for it when it is too large."""

    topic: str
    value: bytes
    key: bytes | None
    headers: Headers | None
    partition: int | None
    done: Done | None
    substitute: Callable[[PenstockError], bytes] | None
    must: bool


class Publisher:
    """Encodes and sends. `backlog` counts what the local queue refused and must still go out."""

    def __init__(self, transport: Sending, codec: Codec, names: TopicNames) -> None:
        self._transport = transport
        self._codec = codec
        self._names = names
        self._waiting: deque[_Outgoing] = deque()
        self.sent_total = 0
        self.unacknowledged = 0

    @property
    def backlog(self) -> int:
        return len(self._waiting)

    def chunk(self, event: ResultEvent, done: Done | None = None) -> None:
        """Publish a piece of a stream. Raises BadAvro, TooLarge for one that can never be published."""
        self._send(
            _Outgoing(
                topic=self._names.result,
                value=self._codec.encode(event),
                key=event.request_id.encode(),
                headers=None,
                partition=None,
                done=done,
                substitute=None,
                must=True,
            )
        )

    def result(self, event: ResultEvent, done: Callable[[PenstockError | None], None]) -> None:
        """Publish the terminal event; `done` runs after the broker acknowledged it.

        What can never be published is replaced by a small failed event, whose error `done` is told.
        """
        failure: PenstockError | None = None

        def substitute(error: PenstockError) -> bytes:
            nonlocal failure
            failure = error
            return self._codec.encode(small_failure(event, error))

        try:
            value = self._codec.encode(event)
        except BadAvro as error:  # e.g. a lone surrogate in an engine's text
            logger.error("publish.unencodable request=%s error=%s", event.request_id, error)
            value = substitute(InternalError("the output cannot be encoded"))
        self._send(
            _Outgoing(
                topic=self._names.result,
                value=value,
                key=event.request_id.encode(),
                headers=None,
                partition=None,
                done=lambda: done(failure),
                substitute=substitute,
                must=True,
            )
        )

    def status(self, event: StatusEvent) -> None:
        """Publish a status; it is advice, so one that cannot be sent now is dropped."""
        self._send(
            _Outgoing(
                topic=self._names.status,
                value=self._codec.encode(event),
                key=event.request_id.encode(),
                headers=None,
                partition=None,
                done=None,
                substitute=None,
                must=event.done,
            )
        )

    def dead_letter(self, letter: DeadLetter, done: Done) -> None:
        """Publish a dead letter; when even that is too large, the same with the first bytes of the original only."""

        def cut(_error: PenstockError) -> bytes:
            reason = f"{letter.reason} (the original of {len(letter.original)} bytes is cut to its first 64 KiB)"
            return self._codec.encode(
                dataclasses.replace(
                    letter, original=letter.original[: 1 << 16], original_key=None, original_headers={}, reason=reason
                )
            )

        self._send(
            _Outgoing(
                topic=self._names.dlq,
                value=self._codec.encode(letter),
                key=None if letter.request_id is None else letter.request_id.encode(),
                headers=None,
                partition=None,
                done=done,
                substitute=cut,
                must=True,
            )
        )

    def republish(
        self, topic: str, value: bytes, *, key: bytes | None, headers: Headers, partition: int, done: Done
    ) -> None:
        """Put a request's original bytes on the partition where it belongs."""
        self._send(
            _Outgoing(
                topic=topic,
                value=value,
                key=key,
                headers=headers,
                partition=partition,
                done=done,
                substitute=None,
                must=True,
            )
        )

    def record(self, topic: str, key: str, record: Any) -> None:
        """Publish a fact about this worker (state, model); the latest wins, so a lost one does not matter."""
        self._send(
            _Outgoing(
                topic=topic,
                value=self._codec.encode(record),
                key=key.encode(),
                headers=None,
                partition=None,
                done=None,
                substitute=None,
                must=False,
            )
        )

    def tick(self) -> None:
        """Offer again what the local queue refused."""
        for _ in range(len(self._waiting)):
            if not self._offer(self._waiting[0]):
                return
            self._waiting.popleft()

    def _send(self, outgoing: _Outgoing) -> None:
        if (self._waiting and outgoing.must) or (
            not self._offer(outgoing) and outgoing.must
        ):  # keep the order of one request's events
            self._waiting.append(outgoing)

    def _offer(self, outgoing: _Outgoing) -> bool:
        """True when the transport took it (or refused it for good and the substitute was taken)."""

        def delivered(delivery: Delivery) -> None:
            self.unacknowledged -= 1
            error = delivery.error
            if error is None:
                self.sent_total += 1
                if outgoing.done is not None:
                    outgoing.done()
            else:
                self._failed(outgoing, error)

        try:
            self._transport.produce_nowait(
                outgoing.topic,
                outgoing.value,
                key=outgoing.key,
                headers=outgoing.headers,
                partition=outgoing.partition,
                callback=delivered,
            )
        except TooLarge as error:
            if outgoing.topic == self._names.result and outgoing.substitute is None:
                raise
            return self._substitute(outgoing, error)
        except PenstockError as error:
            logger.warning("publish.refused topic=%s error=%s", outgoing.topic, error.code)
            return False
        self.unacknowledged += 1
        return True

    def _failed(self, outgoing: _Outgoing, error: PenstockError) -> None:
        logger.warning("publish.failed topic=%s error=%s %s", outgoing.topic, error.code, error)
        if isinstance(error, TooLarge):
            self._substitute(outgoing, error)
        elif outgoing.must:
            self._waiting.append(outgoing)

    def _substitute(self, outgoing: _Outgoing, error: PenstockError) -> bool:
        if outgoing.substitute is None:
            # Nothing can stand in for it: the offset stays uncommitted and the watchdog will say so.
            logger.error("publish.impossible topic=%s error=%s", outgoing.topic, error)
            return True
        outgoing.value = outgoing.substitute(error)
        outgoing.substitute = None
        return self._offer(outgoing) or self._keep(outgoing)

    def _keep(self, outgoing: _Outgoing) -> bool:
        self._waiting.append(outgoing)
        return True


def small_failure(event: ResultEvent, error: PenstockError) -> ResultEvent:
    """The failed event that stands in for one that the broker will never take."""
    return dataclasses.replace(
        event,
        kind="terminal",
        status="failed",
        text=None,
        token_ids=None,
        first_token_index=None,
        text_offset=None,
        text_generation=None,
        embedding=None,
        output_artifact=None,
        finish_reason=None,
        error=to_error_record(error),
        metadata={},
    )
