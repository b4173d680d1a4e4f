"""What is said of a request, and the order that keeps the promise: outcome → broker's ack → gate → commit."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from penstock.processors.core.gate import CommitGate
from penstock.processors.faults import Faults
from penstock.processors.kafka.publisher import Publisher
from penstock.processors.metrics import Metrics
from penstock.processors.work import Stage, Work
from penstock.schemas.errors import BadAvro, InternalError, PenstockError, TooLarge, to_error_record
from penstock.schemas.records import ArtifactRef, DeadLetter, Origin, ResultEvent, StatusEvent, Usage

logger = logging.getLogger(__name__)

_RANK = {"accepted": 0, "queued": 10, "waiting_for_memory": 20, "loading_model": 30, "running": 40, "retrying": 50}
_TERMINAL_RANK = 100


def now_ms() -> int:
    return int(time.time() * 1000)


class Outcomes:
    """Builds and publishes the events of works. Nothing is published for a work that was dropped (invariant 10)."""

    def __init__(
        self,
        publisher: Publisher,
        gate: CommitGate,
        metrics: Metrics,
        faults: Faults,
        *,
        worker_id: str,
        status_linger_s: float,
        clock: Callable[[], float],
        on_settled: Callable[[Work], None],
        on_chunk_refused: Callable[[Work, PenstockError], None],
    ) -> None:
        self._publisher = publisher
        self._gate = gate
        self._metrics = metrics
        self._faults = faults
        self._worker_id = worker_id
        self._linger_s = status_linger_s
        self._clock = clock
        self._on_settled = on_settled
        self._on_chunk_refused = on_chunk_refused
        self._due: deque[tuple[float, Work, str, str | None]] = deque()

    # -- statuses that are not terminal

    def status(self, work: Work, status: str, detail: str | None = None, *, at_once: bool = False) -> None:
        """Say that the work is in this status, if that still holds after the linger."""
        if work.pending_status == status and not at_once:
            return
        work.pending_status = status
        if at_once:
            self._publish_status(work, status, detail)
        else:
            self._due.append((self._clock() + self._linger_s, work, status, detail))

    def flush_statuses(self, now: float) -> None:
        """Publish the statuses that have lasted; called by the shared ticker."""
        due = self._due
        while due and due[0][0] <= now:
            _, work, status, detail = due.popleft()
            if work.pending_status == status and work.published_status != status and work.live:
                self._publish_status(work, status, detail)

    def moved_up(self, work: Work) -> None:
        """Say a waiting work's new position, if it was told to be waiting at all."""
        if work.published_status == work.pending_status == "queued":
            self._publish_status(work, "queued", None)

    def _publish_status(self, work: Work, status: str, detail: str | None) -> None:
        if not work.live:
            return
        work.published_status = status
        self._publisher.status(self._status_event(work, status, done=False, detail=detail))

    def _status_event(self, work: Work, status: str, *, done: bool, detail: str | None) -> StatusEvent:
        return StatusEvent(
            request_id=work.request.request_id,
            tenant=work.request.tenant,
            status=status,
            done=done,
            rank=_TERMINAL_RANK if done else _RANK[status],
            attempt=work.attempt,
            epoch=work.epoch,
            origin=work.origin,
            worker_id=self._worker_id,
            created_at=now_ms(),
            detail=detail,
            position=work.position if status == "queued" else None,
            model=None if work.model is None else work.model.id,
        )

    # -- chunks

    def flush_chunk(self, work: Work, now: float) -> None:
        """Publish the text that has gathered since the last chunk."""
        work.buffered_at = None
        text = "".join(work.text[work.sent_pieces :])
        tokens = work.tokens[work.sent_tokens :]
        if not (text or tokens) or not work.live:
            return
        event = ResultEvent(
            request_id=work.request.request_id,
            tenant=work.request.tenant,
            kind="chunk",
            origin=work.origin,
            attempt=work.attempt,
            epoch=work.epoch,
            task=work.request.task,
            created_at=now_ms(),
            worker_id=self._worker_id,
            text=text,
            token_ids=tokens,
            first_token_index=work.sent_tokens,
            text_offset=work.sent_chars,
            metadata={},
        )
        work.sent_pieces = len(work.text)
        work.sent_chars += len(text)
        work.sent_tokens += len(tokens)
        try:
            self._publisher.chunk(event, self._mid_stream if self._faults.armed("mid_stream") else None)
        except (BadAvro, TooLarge) as error:
            logger.error("chunk.refused request=%s error=%s", event.request_id, error.code)
            self._on_chunk_refused(work, InternalError("a piece of the output cannot be published"))

    def _mid_stream(self) -> None:
        self._faults.hit("mid_stream")

    # -- outcomes

    def settle(
        self,
        work: Work,
        status: str,
        *,
        output: Mapping[str, Any] | None = None,
        artifact: ArtifactRef | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        error: PenstockError | None = None,
        device: str | None = None,
        measured_memory_bytes: int | None = None,
    ) -> None:
        """Publish the terminal event once; when the broker has it, the record's offset may be committed."""
        if not work.live:
            return
        work.stage = Stage.SETTLING
        work.pending_status = status
        self._faults.hit("before_terminal")
        request = work.request
        outputs: dict[str, Any] = {} if output is None else {request.task: dict(output)}
        now = self._clock()
        event = ResultEvent(
            request_id=request.request_id,
            tenant=request.tenant,
            kind="terminal",
            origin=work.origin,
            attempt=work.attempt,
            epoch=work.epoch,
            task=request.task,
            created_at=now_ms(),
            worker_id=self._worker_id,
            status=status,
            output_artifact=artifact,
            finish_reason=finish_reason,
            usage=usage,
            timings=work.timings(now),
            model=None if work.model is None else work.model.id,
            device=device,
            measured_memory_bytes=measured_memory_bytes,
            error=None if error is None else to_error_record(error),
            metadata=request.metadata,
            **outputs,
        )
        self._publisher.result(
            event, lambda failure: self._settled(work, status if failure is None else "failed", ended_at=now)
        )

    def dead_letter(self, work: Work, error: PenstockError, original: bytes, headers: dict[str, bytes]) -> None:
        """Keep the record in the dead-letter topic, then end the request: both before its offset is committed."""
        if not work.live:
            return
        work.keeping = True
        self.letter(
            error,
            original=original,
            headers=headers,
            key=None,
            request_id=work.request.request_id,
            tenant=work.request.tenant,
            origin=work.origin,
            attempts=work.attempt,
            done=lambda: self.settle(work, "dead_lettered", error=error),
        )

    def letter(
        self,
        error: PenstockError,
        *,
        original: bytes,
        headers: dict[str, bytes],
        key: bytes | None,
        request_id: str | None,
        tenant: str | None,
        origin: Origin,
        attempts: int,
        done: Callable[[], None],
    ) -> None:
        """Write a dead letter; `done` runs when the broker has it."""
        self._metrics.dead_letters.labels(error.code).inc()
        logger.warning(
            "dlq.letter topic=%s partition=%d offset=%d reason=%s",
            origin.topic,
            origin.partition,
            origin.offset,
            error.code,
        )
        letter = DeadLetter(
            request_id=request_id,
            tenant=tenant,
            reason_code=error.code,
            reason=str(error),
            original=original,
            original_key=key,
            original_headers=headers,
            origin=origin,
            worker_id=self._worker_id,
            attempts=attempts,
            created_at=now_ms(),
        )
        self._publisher.dead_letter(letter, done)

    def commit(self, topic: str, partition: int, offset: int) -> None:
        """The record's outcome is durable: let its offset, and what waited behind it, be committed."""
        self._faults.hit("before_commit")
        for event in self._gate.complete((topic, partition), offset):
            event.ack()

    def _settled(self, work: Work, status: str, *, ended_at: float) -> None:
        if work.stage is Stage.DROPPED:
            return
        ran_s = None if work.run_at is None else ended_at - work.run_at
        started = work.started_at if work.started_at is not None else ended_at
        self._metrics.outcome(work.request.task, status, waited_s=started - work.arrived_at, ran_s=ran_s)
        self.commit(*work.key)
        work.stage = Stage.DONE
        self._publisher.status(self._status_event(work, status, done=True, detail=None))
        self._on_settled(work)
