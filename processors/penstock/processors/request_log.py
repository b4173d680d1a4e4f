"""One line for each request that has ended here: ids, times and outcome. No prompt, no output."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.common.tracing import context_of
from penstock.processors.core.effects import Terminal
from penstock.processors.kafka.publisher import Headers
from penstock.schemas.logs import Fields
from penstock.schemas.topics import HEADER_TRACEPARENT

logger = logging.getLogger(__name__)


def log_ended(
    effect: Terminal, status: str, worker_id: str, device: Callable[[], str | None], headers: Headers | None
) -> None:
    """`status` is what the broker has acknowledged. `headers` name the trace."""
    if not logger.isEnabledFor(logging.INFO):
        return
    subject, timings = effect.subject, effect.timings
    usage = {} if effect.finished is None else effect.finished.usage or {}
    trace = context_of(dict(headers or ()).get(HEADER_TRACEPARENT))
    logger.info(
        Fields(
            "request.ended",
            request_id=subject.request_id,
            status=status,
            error=None if effect.error is None else effect.error.code,
            task=subject.task,
            model=subject.lane or None,
            tenant=subject.tenant,
            key_id=subject.labels.key_id,
            conversation_id=subject.conversation_id,
            priority=subject.priority,
            priority_class=effect.klass,
            worker_id=worker_id,
            device=device(),
            attempt=subject.attempt,
            epoch=subject.epoch,
            queued_ms=timings.queued_ms,
            load_ms=timings.load_ms,
            run_ms=timings.run_ms,
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            trace_id=None if trace is None else f"{trace.trace_id:032x}",
        )
    )
