"""One message's errand: make a request of it, wait for the outcome, write the answer. At most one request per try.

The request's id stands for the message (and the try), so another bridge that gets the message again finds the request
that the first one sent, and its outcome.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.common.artifacts import ArtifactStore
from penstock.common.clock import now_ms
from penstock.common.group_consumer import Read
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.bridge.requests import Accepted, Outcome, Requests
from penstock.gateway.edge.errors import FinalFailure, outcome_error
from penstock.gateway.edge.validation import validated
from penstock.gateway.limits.callers import DEFAULT_PRIORITY, Caller
from penstock.gateway.openai import chat_answers as answers
from penstock.gateway.openai import chat_bodies as bodies
from penstock.gateway.openai.completion_answers import Shape, completion
from penstock.gateway.queues.formats import (
    BadMessage,
    Json,
    LlmdMessage,
    answered,
    read_llmd,
    read_penstock,
    refused,
    request_key,
    sender_of,
)
from penstock.gateway.queues.settings import QueueSection
from penstock.gateway.service.large_answers import beside_the_loop, whole_result
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.outputs import encode_json, error_json, result_json
from penstock.schemas.aliases import named, names_in
from penstock.schemas.codec import Codec
from penstock.schemas.errors import (
    DeadLettered,
    Expired,
    PenstockError,
    TooLarge,
    error_body,
    to_error_record,
)
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.lifetimes import deadline_of
from penstock.schemas.limits import LIMITS
from penstock.schemas.records import DeadLetter, InferenceRequest, Origin, ResultEvent

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class TryAgain(Exception):  # not frozen: what it passes through sets its traceback
    """Not now. `tried`: the request had an outcome, so that the next try is a new request."""

    error: PenstockError
    tried: bool


class StoreReads:
    """Reads of the artifact store, on threads."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    async def stored(self, tenant: str, work: Callable[[ArtifactStore], T]) -> T:
        """See `whole_result`."""
        return await asyncio.to_thread(work, self._store)


class MessageHandler:
    """`transport` writes answers and dead letters; `reads` fetches outputs that are artifacts."""

    def __init__(
        self, requests: Requests, transport: AsyncTransport, reads: StoreReads, kafka: KafkaSettings, codec: Codec
    ) -> None:
        self._requests = requests
        self._transport = transport
        self._reads = reads
        self._kafka = kafka
        self._codec = codec

    async def run(self, queue: QueueSection, read: Read, tries: int) -> str:
        """What became of it, when that is durable: completed, refused or dead_lettered.

        Raises TryAgain; BrokerUnavailable and Overloaded where nothing can be written now.
        """
        if read.value is None:
            return "ignored"  # a tombstone asks for nothing
        await self._requests.up_to_date()  # before times to live are counted
        try:
            if queue.format == "llm-d":
                return await self._llmd(queue, read.value, tries)
            return await self._penstock(queue, read)
        except BadMessage as error:
            return await self._refuse(queue, error.message_id, error.error)
        except _Unreadable as error:
            await self._dead_letter(queue, read, error.cause)
            return "dead_lettered"

    async def flush(self) -> None:
        """Wait until all requests that were sent stand on their topics."""
        await self._requests.flush()

    # -- llm-d

    async def _llmd(self, queue: QueueSection, value: bytes, tries: int) -> str:
        try:
            message = read_llmd(value)
        except PenstockError as error:
            raise _Unreadable(error) from None
        try:
            request, chosen = self._request_of(queue, message, was_sent=self._was_sent(queue, message, tries))
            request_id = _request_id(queue, message, tries)
            request = dataclasses.replace(request, request_id=request_id)
            accepted = await self._requests.accepted(request, queue.extra, names_priority=chosen)
            event = (await self._outcome(accepted)).event
            result = await whole_result(self._reads, queue.tenant, _completed(event))
            answer = await self._shaped(message, request, request_id, result)
        except FinalFailure as failure:
            if _may_pass(failure.error) and self._has_another_try(queue, message, tries + 1):
                raise TryAgain(failure.error, True) from None
            await self._answer(queue, message.id, refused(message.id, failure.error))
            return "refused"
        except PenstockError as error:
            if error.retryable:
                raise TryAgain(error, False) from None
            return await self._refuse(queue, message.id, error)
        await self._answer(queue, message.id, answer)
        return "completed"

    def _was_sent(self, queue: QueueSection, message: LlmdMessage, tries: int) -> bool:
        """Whether this try was begun before: its outcome may have been answered, by a bridge that died before it
        could commit the message. Then the same is answered again, also behind the deadline.
        """
        return self._requests.knows(queue.tenant, _request_id(queue, message, tries))

    def _has_another_try(self, queue: QueueSection, message: LlmdMessage, tries: int) -> bool:
        if message.deadline_s is None:
            return False
        return time.time() < message.deadline_s or self._was_sent(queue, message, tries)

    def _request_of(
        self, queue: QueueSection, message: LlmdMessage, *, was_sent: bool
    ) -> tuple[InferenceRequest, bool]:
        """The request, and whether its message names a priority. Raises PenstockError."""
        left_ms = LIMITS.max_ttl_ms
        if message.deadline_s is not None:
            left_ms = min(left_ms, message.deadline_s * 1000 - now_ms())
            if left_ms <= 0 and not was_sent:
                raise Expired("deadline exceeded")
            left_ms = max(1, left_ms)
        caller = Caller(tenant=queue.tenant)
        match message.kind:
            case "chat":
                body = validated(bodies.ChatCompletionBody, message.body)
                request = bodies.chat_request(body, caller, now_ms())
            case "completion":
                body = validated(bodies.CompletionBody, message.body)
                request = bodies.completion_request(body, caller, now_ms())
            case "embedding":
                body = validated(bodies.EmbeddingBody, message.body)
                request = bodies.embedding_request(body, caller, now_ms())
        chosen = body.penstock is not None and body.penstock.priority is not None
        tier: str | None = getattr(body, "service_tier", None)
        request = dataclasses.replace(
            request,
            pool=request.pool or queue.pool,
            priority=request.priority if chosen or tier is not None else queue.priority,
            ttl_ms=min(left_ms, request.ttl_ms or left_ms),
        )
        return request, chosen or bodies.tier_priority(tier) is not None

    async def _shaped(self, message: LlmdMessage, request: InferenceRequest, request_id: str, result: Json) -> bytes:
        model, created = request.model or "default", int(time.time())

        def make() -> bytes:
            match message.kind:
                case "chat":
                    answer = answers.chat_completion(request_id, created, model, result, None)
                case "completion":
                    shape = Shape.of(bodies.CompletionBody.model_validate(message.body))
                    answer = completion(request_id, created, model, result, shape, None)
                case "embedding":
                    answer = answers.embedding_list(model, result, message.body.get("encoding_format"))
            return answered(message.id, message.form, answer)

        return await beside_the_loop(result, make)

    # -- Penstock's own

    async def _penstock(self, queue: QueueSection, read: Read) -> str:
        origin = (*read.tp, read.offset, read.timestamp_ms)
        try:
            assert read.value is not None
            request = read_penstock(read.value, queue, self._codec, origin)
        except PenstockError as error:
            if error.retryable:
                raise TryAgain(error, False) from None
            if (sender := sender_of(read.value, origin)) is not None:
                request_id, labels = sender
                answer = {"request_id": request_id, **labels._asdict(), **_error_json(error)}
                await self._answer(queue, request_id, _dumped(answer))
            raise _Unreadable(error) from None
        request = _older(dataclasses.replace(request, pool=request.pool or queue.pool), read.timestamp_ms)
        request_id = request.request_id
        try:
            chosen = request.priority != DEFAULT_PRIORITY  # Avro has it also where nobody named it
            accepted = await self._requests.accepted(request, queue.extra, names_priority=chosen)
        except PenstockError as error:
            if error.retryable:
                raise TryAgain(error, False) from None
            error = named(error, names_in(read.value))
            answer = _dumped({"request_id": request_id, **_error_json(error)})
            return await self._refuse(queue, request_id, error, answer)
        outcome = await self._outcome(accepted)
        result = result_json(outcome.event)
        answer = await beside_the_loop(result or {}, lambda: encode_json(_public(accepted, outcome)).encode())
        await self._answer(queue, request_id, answer)
        return "completed" if outcome.event.status == "completed" else "refused"

    # -- both

    async def _outcome(self, accepted: Accepted) -> Outcome:
        """Raises TryAgain when it cannot be followed now: the next try finds the same request."""
        try:
            return await self._requests.outcome(accepted)
        except PenstockError as error:
            raise TryAgain(error, False) from None

    async def _refuse(
        self, queue: QueueSection, message_id: str, error: PenstockError, answer: bytes | None = None
    ) -> str:
        """Of a message that became no request: no outcome says so. `answer`: None in the form of llm-d.

        Raises as `_answer`.
        """
        if queue.result_topic is None:
            logger.warning("queues.refused topic=%s id=%s code=%s", queue.topic, message_id, error.code)
        await self._answer(queue, message_id, answer or refused(message_id, error))
        return "refused"

    async def _answer(self, queue: QueueSection, message_id: str, value: bytes) -> None:
        """Raises BrokerUnavailable and its like."""
        if queue.result_topic is None:
            return
        key = message_id.encode("utf-8", "surrogatepass")
        try:
            await self._transport.produce(queue.result_topic, value, key=key)
        except TooLarge as error:
            await self._transport.produce(queue.result_topic, refused(message_id, error), key=key)

    async def _dead_letter(self, queue: QueueSection, read: Read, error: PenstockError) -> None:
        info = to_error_record(error)
        letter = DeadLetter(
            tenant=queue.tenant,
            reason_code=info.code,
            reason=info.message,
            original=read.value or b"",
            original_key=read.key,
            origin=Origin(topic=read.tp[0], partition=read.tp[1], offset=read.offset, append_time_ms=read.timestamp_ms),
            worker_id=self._kafka.client_id,
            created_at=now_ms(),
        )
        await self._transport.produce(self._kafka.names.dlq, self._codec.encode(letter))


class _Unreadable(Exception):
    """Nobody can get an error for it: the dead letters keep it."""

    def __init__(self, cause: PenstockError) -> None:
        super().__init__(cause.message)
        self.cause = cause


def _request_id(queue: QueueSection, message: LlmdMessage, tries: int) -> str:
    return idempotent_request_id(queue.tenant, request_key(queue, message.id, tries))


def _may_pass(error: PenstockError) -> bool:
    """Whether a new request may end otherwise, as llm-d judges it: too many requests, or the server's fault."""
    return (error.http_status == 429 or error.http_status >= 500) and not isinstance(error, Expired | DeadLettered)


def _older(request: InferenceRequest, since_ms: int) -> InferenceRequest:
    """Its time to live counts from when it came to its queue."""
    at_ms = now_ms()
    return dataclasses.replace(request, ttl_ms=max(1, deadline_of(request, min(since_ms, at_ms)) - at_ms))


def _completed(event: ResultEvent) -> Json:
    """The result of a completed request with the model that made it. Raises FinalFailure for every other outcome."""
    if event.status == "completed":
        return {"model": event.model, **(result_json(event) or {})}
    error = outcome_error(event.status or "failed", error_json(event, event.request_id))
    raise FinalFailure(bodies.in_openai_words(error), event.request_id)


def _public(accepted: Accepted, outcome: Outcome) -> Json:
    """The request as `GET /v1/requests/{id}` shows it."""
    event, status = outcome.event, outcome.status
    entry = Entry(event.tenant, event.request_id, 0)
    entry.on_request(accepted.request, event.origin)
    entry.on_result(event, 0)
    last = {} if status is None else {"model_reason": status.model_reason, "ttl_ms": status.ttl_ms}
    return {**entry.to_json(), **last}


def _error_json(error: PenstockError) -> dict[str, Any]:
    return {"status": "failed", "done": True, "result": None, **error_body(error)}


def _dumped(value: dict[str, Any]) -> bytes:
    return answers.compact_json(value).encode("utf-8", "backslashreplace")
