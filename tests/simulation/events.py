"""The events that a worker publishes, as `kafka/outcomes.py` builds them, without their encoding."""

from __future__ import annotations

from penstock.processors.core.effects import Chunk, Letter, Republish, Status, Terminal
from penstock.processors.kafka.intake import origin_header
from penstock.schemas.codec import Codec
from penstock.schemas.errors import to_error_record
from penstock.schemas.records import STATUS_RANKS, DeadLetter, ResultEvent, StatusEvent


def status(effect: Status, worker: str, now_ms: int) -> StatusEvent:
    work = effect.work
    return StatusEvent(
        request_id=work.request_id,
        tenant=work.tenant,
        status=effect.status,
        done=effect.done,
        rank=STATUS_RANKS[effect.status],
        attempt=effect.attempt,
        epoch=effect.epoch,
        origin=work.origin,
        worker_id=worker,
        created_at=now_ms,
        detail=effect.detail,
        position=work.position if effect.status == "queued" else None,
        model=work.lane or None,
    )


def chunk(effect: Chunk, worker: str, now_ms: int) -> ResultEvent:
    work = effect.work
    return ResultEvent(
        request_id=work.request_id,
        tenant=work.tenant,
        kind="chunk",
        origin=work.origin,
        attempt=effect.attempt,
        epoch=effect.epoch,
        task=work.task,
        created_at=now_ms,
        worker_id=worker,
        text=effect.text,
        token_ids=effect.token_ids,
        first_token_index=effect.first_token_index,
        text_offset=effect.text_offset,
    )


def terminal(effect: Terminal, worker: str, now_ms: int) -> ResultEvent:
    """An output that can never be published becomes a small failed event, as the publisher makes it."""
    work, output = effect.work, effect.finished
    unwritable = output is not None and output.unwritable
    return ResultEvent(
        request_id=work.request_id,
        tenant=work.tenant,
        kind="terminal",
        origin=effect.origin or work.origin,
        attempt=work.attempt,
        epoch=work.epoch,
        task=work.task,
        created_at=now_ms,
        worker_id=worker,
        status="failed" if unwritable else effect.status,
        timings=work.timings(effect.at),
        model=work.lane or None,
        error=None if effect.error is None else to_error_record(effect.error),
        metadata=work.request.metadata,
        **({work.task: {"text": output.text}} if output is not None and not unwritable else {}),
    )


def letter(effect: Letter, worker: str, now_ms: int) -> DeadLetter:
    work, body = effect.work, effect.work.body
    return DeadLetter(
        request_id=work.request_id or None,
        tenant=None if effect.nameless else work.tenant,
        reason_code=effect.error.code,
        reason=str(effect.error),
        original=b"" if body is None else body.value,
        original_key=None if body is None else body.record_key,
        origin=work.origin,
        worker_id=worker,
        attempts=work.attempt,
        created_at=now_ms,
    )


def republished(effect: Republish, codec: Codec) -> tuple[bytes, bytes, list[tuple[str, bytes]]]:
    """Key, value and headers of a record that goes to the partition of its conversation."""
    work, body = effect.work, effect.work.body
    assert body is not None
    name, value = origin_header(effect.origin)
    kept = [(header, content or b"") for header, content in body.headers if header != name]
    return (work.line or "").encode(), codec.encode(body.request), [*kept, (name, value)]
