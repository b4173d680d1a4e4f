"""Makes the records that are published of a request: statuses, chunks, the one terminal event, dead letters."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.common.clock import now_ms
from penstock.processors.core.effects import Chunk, PublishDeadLetter, Republish, ShowPreview, Status, Terminal
from penstock.processors.core.work.work import Subject
from penstock.processors.engines.base import Finished
from penstock.processors.kafka.publisher import Headers, Publisher
from penstock.processors.kafka.topic_watch import PoolTopics
from penstock.processors.outputs import pixels_of
from penstock.processors.preparation import Preparation
from penstock.processors.request_log import log_ended
from penstock.schemas.aliases import named, names_in
from penstock.schemas.codec import Codec
from penstock.schemas.errors import InvalidRequest, PenstockError, to_error_record
from penstock.schemas.origins import origin_header
from penstock.schemas.records import STATUS_RANKS, ContextHeld, DeadLetter, Preview, ResultEvent, StatusEvent, Usage
from penstock.schemas.texts import encodable, shortened
from penstock.schemas.topics import HEADER_CALLBACK, HEADER_NAMES, HEADER_TRACEPARENT, TopicNames, request_key

logger = logging.getLogger(__name__)

MAX_TRACE_BYTES = 256
MOST_CAUSES, MAX_CAUSE_CHARS = 8, 300
"""What a dead letter holds of the errors that led to it."""

EngineFacts = Callable[[str, int], tuple[str | None, int | None]]
"""Device and measured bytes of the engine of a replica, by its model and number."""


def trace_of(subject: Subject) -> Headers | None:
    """The trace that the request came with, for all that is said of it; it is not known while the request is parked."""
    for name, value in () if subject.body is None else subject.body.headers:
        if name == HEADER_TRACEPARENT and value is not None and len(value) <= MAX_TRACE_BYTES:
            return [(name, value)]
    return None


def _named(error: PenstockError, subject: Subject) -> PenstockError:
    """The error with the names that the request's record uses for its fields."""
    if error.param is None or subject.body is None:
        return error
    return named(error, names_in(subject.body.value, subject.body.headers))


class Outcomes:
    """Builds the events of effects and hands them to the publisher."""

    def __init__(
        self,
        publisher: Publisher,
        codec: Codec,
        names: TopicNames,
        *,
        worker_id: str,
        engine_facts: EngineFacts,
        pool_topics: PoolTopics | None = None,
        trace: Callable[[Subject], Headers | None] = trace_of,
    ) -> None:
        """`trace` gives the header that names the trace of what is published of a request."""
        self._trace = trace
        self._pool_topics = pool_topics
        self._publisher = publisher
        self._names = names
        self._codec = codec
        self._worker_id = worker_id
        self._engine_facts = engine_facts

    def _result_headers(self, subject: Subject) -> Headers | None:
        """Of what goes to the result topic: the trace, and who is to be called back (see decisions/0059)."""
        url = subject.request.callback_url
        trace = self._trace(subject)
        return trace if url is None else [*(trace or ()), (HEADER_CALLBACK, url.encode())]

    def status(self, effect: Status) -> None:
        subject = effect.subject
        self._publisher.status(
            StatusEvent(
                request_id=subject.request_id,
                tenant=subject.tenant,
                status=effect.status,
                done=effect.done,
                rank=STATUS_RANKS[effect.status],
                attempt=subject.attempt,
                epoch=subject.epoch,
                origin=subject.origin,
                worker_id=self._worker_id,
                created_at=now_ms(),
                detail=effect.detail,
                position=effect.position,
                model=subject.lane or None,
                waiting_for=effect.waiting,
                ttl_ms=effect.ttl_ms,
                model_reason=effect.model_reason,
                step=effect.step,
                steps=effect.steps,
                history=subject.history,
                **subject.labels.of_events(),
            ),
            headers=self._result_headers(subject) if subject.request.callback_statuses else self._trace(subject),
        )

    def _on_the_way(self, subject: Subject, kind: str, **values: Any) -> ResultEvent:
        """An event of a run that has not ended; `values` are the fields of its kind."""
        return ResultEvent(
            request_id=subject.request_id,
            tenant=subject.tenant,
            kind=kind,
            origin=subject.origin,
            attempt=subject.attempt,
            epoch=subject.epoch,
            task=subject.task,
            created_at=now_ms(),
            worker_id=self._worker_id,
            metadata={},
            **subject.labels.of_events(),
            **values,
        )

    def chunk(self, effect: Chunk, acknowledged: Callable[[], None] | None, refused: Callable[[], None]) -> None:
        """Publish a piece of a stream; `refused` is called, at once or later, if it can never be published."""
        subject = effect.subject
        event = self._on_the_way(
            subject,
            "chunk",
            text=effect.text,
            token_ids=effect.token_ids,
            first_token_index=effect.first_token_index,
            text_offset=effect.text_offset,
            tool_call_pieces=effect.calls or None,
            token_logprobs=effect.logprobs or None,
            first_logprob_index=effect.first_logprob_index if effect.logprobs else None,
            **since_fields(effect.since),
        )

        def never(error: PenstockError) -> None:
            _log_refusal("chunk", subject, error)
            refused()

        self._publisher.chunk(event, acknowledged, refused=never, headers=self._result_headers(subject))

    def claim(self, subject: Subject, acknowledged: Callable[[], None]) -> None:
        """Publish that its present (epoch, attempt) says what follows of its stream, whatever others still say."""
        event = self._on_the_way(subject, "chunk")
        refused = partial(_log_refusal, "claim", subject)
        self._publisher.chunk(event, acknowledged, refused=refused, headers=self._result_headers(subject))

    def preview(self, effect: ShowPreview, preview: Preview) -> None:
        """Publish where a preview lies. One that cannot be published is left out: it is advice."""
        subject = effect.subject
        event = self._on_the_way(subject, "preview", preview=preview)
        refused = partial(_log_refusal, "preview", subject)
        self._publisher.chunk(event, refused=refused, headers=self._result_headers(subject))

    def terminal(self, effect: Terminal, done: Callable[[str], None]) -> None:
        """Publish the outcome; `done` gets its status when the broker has it."""
        subject, finished = effect.subject, effect.finished
        output: dict[str, Any] = {}
        device = measured = None
        if finished is not None:
            if effect.replica is not None:
                device, measured = self._engine_facts(subject.lane, effect.replica)
            if effect.artifact is None:
                output[subject.task] = dict(finished.output)
        event = ResultEvent(
            request_id=subject.request_id,
            tenant=subject.tenant,
            kind="terminal",
            origin=effect.origin or subject.origin,
            attempt=subject.attempt,
            epoch=subject.epoch,
            task=subject.task,
            created_at=now_ms(),
            worker_id=self._worker_id,
            status=effect.status,
            output_artifact=effect.artifact,
            finish_reason=None if finished is None else finished.finish_reason,
            usage=None if finished is None else usage_of(finished),
            cached_tokens=None if finished is None else (finished.usage or {}).get("cached_tokens"),
            timings=effect.timings,
            model=subject.lane or None,
            device=device,
            measured_memory_bytes=measured,
            error=None if effect.error is None else to_error_record(_named(effect.error, subject)),
            metadata=subject.request.metadata,
            **since_fields(effect.since),
            history=subject.history,
            context=_held(effect),
            **subject.labels._asdict(),
            **output,
        )
        self._publisher.result(
            event,
            lambda failure: done(effect.status if failure is None else "failed"),
            headers=self._result_headers(subject),
        )

    def acknowledged(self, effect: Terminal, status: str) -> None:
        """The broker has the outcome of a request: log it."""
        subject, replica = effect.subject, effect.replica

        def device() -> str | None:
            return None if replica is None else self._engine_facts(subject.lane, replica)[0]

        log_ended(effect, status, self._worker_id, device, self._trace(subject))

    def letter(self, effect: PublishDeadLetter, done: Callable[[], None]) -> None:
        """Keep the record in the dead-letter topic, with its bytes."""
        subject, error = effect.subject, _named(effect.error, effect.subject)
        origin, body = subject.origin, subject.body
        logger.warning(
            "dlq.letter topic=%s partition=%d offset=%d reason=%s",
            origin.topic,
            origin.partition,
            origin.offset,
            error.code,
        )
        letter = DeadLetter(
            request_id=subject.request_id or None,
            tenant=None if effect.nameless else subject.tenant,
            reason_code=error.code,
            reason=encodable(str(error)),
            original=b"" if body is None else body.value,
            original_key=None if body is None else body.record_key,
            original_headers={} if body is None else {name: value or b"" for name, value in body.headers},
            origin=origin,
            worker_id=self._worker_id,
            attempts=subject.attempt,
            created_at=now_ms(),
            task=None if effect.nameless else subject.task,
            model=subject.lane or subject.request.model,
            error_chain=error_chain(error),
            history=subject.history,
        )
        self._publisher.dead_letter(letter, done)

    def republish(self, effect: Republish, done: Callable[[], None], refused: Callable[[PenstockError], None]) -> None:
        """Put a record where it belongs, with its id and origin. Raises BadAvro.

        `refused` is called when it is too large, as one at the limit can become by its origin, or when there is no such
        pool.
        """
        subject, body = effect.subject, effect.subject.body
        assert body is not None
        request, topic = body.request, subject.key[0]
        if effect.pool is not None:
            request = replace(request, pool=effect.pool)
            topic = self._names.request(request.task, request.priority, effect.pool)
        name, value = origin_header(effect.origin)
        kept = [(header, content or b"") for header, content in body.headers if header != name]
        if names := {} if dict(kept).get(HEADER_NAMES) else names_in(body.value):
            kept.append((HEADER_NAMES, json.dumps(names).encode()))
        publish = partial(
            self._publisher.republish,
            topic,
            self._codec.encode(request),
            key=request_key(request),
            headers=[*kept, (name, value)],
            partition=effect.partition,
            done=done,
            refused=refused,
        )
        if effect.pool is None or self._pool_topics is None:
            publish()
        else:
            no_pool = InvalidRequest(f"there is no pool {effect.pool}", param="pool")
            self._pool_topics.look(topic, publish, lambda: refused(no_pool))


def _log_refusal(what: str, subject: Subject, error: PenstockError) -> None:
    logger.error("%s.refused request_id=%s error=%s", what, subject.request_id, error.code)


def since_fields(place: tuple[int, int] | None) -> dict[str, Any]:
    """Of a result event, whose text began at an earlier (epoch, attempt)."""
    return {} if place is None else {"since_epoch": place[0], "since_attempt": place[1]}


def error_chain(error: BaseException) -> list[str]:
    """The error and what caused it, as `Type: message`, the outermost first."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < MOST_CAUSES:
        chain.append(shortened(f"{type(cause).__name__}: {cause}", MAX_CAUSE_CHARS))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return chain


def usage_of(finished: Finished) -> Usage:
    """Counts as the engine reports them; pixels of the images that it made."""
    prompt, completion = finished.prompt_tokens, finished.completion_tokens
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=(finished.usage or {}).get("total_tokens", prompt + completion),
        pixels=pixels_of(finished.output),
    )


def _held(effect: Terminal) -> ContextHeld | None:
    """What a turn's prompt held of its conversation."""
    prepared: Preparation | None = effect.prepared
    return None if prepared is None or effect.subject.conversation is None else prepared.prepared.held
