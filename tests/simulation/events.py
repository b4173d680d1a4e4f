"""The events that a worker publishes, as `kafka/outcomes.py` builds them, without their encoding."""

from __future__ import annotations

from dataclasses import replace

from penstock.processors.core.effects import Chunk, PublishDeadLetter, Republish, Status, Terminal
from penstock.processors.core.work.work import Subject
from penstock.processors.kafka.outcomes import since_fields
from penstock.schemas.codec import Codec
from penstock.schemas.errors import to_error_record
from penstock.schemas.origins import origin_header
from penstock.schemas.records import STATUS_RANKS, DeadLetter, ResultEvent, StatusEvent
from penstock.schemas.topics import request_key


def status(effect: Status, worker: str, now_ms: int) -> StatusEvent:
    subject = effect.subject
    return StatusEvent(
        request_id=subject.request_id,
        tenant=subject.tenant,
        status=effect.status,
        done=effect.done,
        rank=STATUS_RANKS[effect.status],
        attempt=subject.attempt,
        epoch=subject.epoch,
        origin=subject.origin,
        worker_id=worker,
        created_at=now_ms,
        detail=effect.detail,
        position=effect.position,
        model=subject.lane or None,
    )


def chunk(effect: Chunk, worker: str, now_ms: int) -> ResultEvent:
    return replace(
        claim(effect.subject, worker, now_ms),
        text=effect.text,
        token_ids=effect.token_ids,
        first_token_index=effect.first_token_index,
        text_offset=effect.text_offset,
        token_logprobs=effect.logprobs or None,
        first_logprob_index=effect.first_logprob_index,
        **since_fields(effect.since),
    )


def claim(subject: Subject, worker: str, now_ms: int) -> ResultEvent:
    """A chunk without text."""
    return ResultEvent(
        request_id=subject.request_id,
        tenant=subject.tenant,
        kind="chunk",
        origin=subject.origin,
        attempt=subject.attempt,
        epoch=subject.epoch,
        task=subject.task,
        created_at=now_ms,
        worker_id=worker,
    )


def terminal(effect: Terminal, worker: str, now_ms: int) -> ResultEvent:
    """An output that can never be published becomes a small failed event, as the publisher makes it."""
    subject, output = effect.subject, effect.finished
    unwritable = output is not None and output.unwritable
    return ResultEvent(
        request_id=subject.request_id,
        tenant=subject.tenant,
        kind="terminal",
        origin=effect.origin or subject.origin,
        attempt=subject.attempt,
        epoch=subject.epoch,
        task=subject.task,
        created_at=now_ms,
        worker_id=worker,
        status="failed" if unwritable else effect.status,
        timings=effect.timings,
        model=subject.lane or None,
        error=None if effect.error is None else to_error_record(effect.error),
        metadata=subject.request.metadata,
        **since_fields(effect.since),
        **({subject.task: {"text": output.text}} if output is not None and not unwritable else {}),
    )


def letter(effect: PublishDeadLetter, worker: str, now_ms: int) -> DeadLetter:
    subject, body = effect.subject, effect.subject.body
    return DeadLetter(
        request_id=subject.request_id or None,
        tenant=None if effect.nameless else subject.tenant,
        reason_code=effect.error.code,
        reason=str(effect.error),
        original=b"" if body is None else body.value,
        original_key=None if body is None else body.record_key,
        origin=subject.origin,
        worker_id=worker,
        attempts=subject.attempt,
        created_at=now_ms,
    )


def republished(effect: Republish, codec: Codec) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
    """Key, value and headers of a record that goes to another partition."""
    body = effect.subject.body
    assert body is not None
    name, value = origin_header(effect.origin)
    kept = [(header, content or b"") for header, content in body.headers if header != name]
    return request_key(body.request), codec.encode(body.request), [*kept, (name, value)]
