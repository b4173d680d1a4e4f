"""What is kept of requests for their traces while a worker holds them. Made only where traces are on.

All calls are on the event loop. Spans are made when a request's outcome is acknowledged.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.common.telemetry import Telemetry
from penstock.common.tracing import SpanContext, context_of
from penstock.processors.core.effects import Status, Terminal
from penstock.processors.core.work.work import Body, Subject
from penstock.processors.request_spans import EndedRequest, LostRun, StatusSeen, process_id, spans_of, trace_id
from penstock.schemas.topics import HEADER_TRACEPARENT

MOST_REQUESTS = 100_000
MOST_STATUSES = 32
"""Of a request."""
MOST_LINES = 10_000
"""Conversations whose last turn is remembered."""


@dataclass(slots=True)
class _Request:
    parent: SpanContext | None
    sampled: bool
    trace_id: int
    statuses: list[StatusSeen] = field(default_factory=list[StatusSeen])
    lost: Sequence[LostRun] = ()
    ended_ns: int = 0
    contexts: dict[int, SpanContext] = field(default_factory=dict[int, SpanContext])
    """Of its process span, by epoch."""


class RequestTraces:
    """Of one worker."""

    def __init__(self, telemetry: Telemetry, worker_id: str, group_id: str, result_topic: str) -> None:
        self._telemetry = telemetry
        self._worker_id, self._group_id, self._result_topic = worker_id, group_id, result_topic
        self._requests: OrderedDict[int, _Request] = OrderedDict()
        self._turns: OrderedDict[str, SpanContext] = OrderedDict()

    def arrived(self, subject: Subject, body: Body) -> None:
        """A new request. Its trace is known from now on, also while its bytes are not here."""
        self._keep(subject, self._begun(subject, body))

    def headers(self, subject: Subject) -> list[tuple[str, bytes]] | None:
        """For what is published of a request: it belongs to the process span. None of one that was forgotten, while
        its bytes are not here."""
        request = self._requests.get(subject.seq)
        if request is None:  # what has ended is not kept again
            if subject.body is None:
                return None
            request = self._begun(subject, subject.body)
        return [(HEADER_TRACEPARENT, self._context(request, subject).traceparent.encode())]

    def status(self, effect: Status) -> None:
        request = None if effect.done else self._of(effect.subject)
        if request is not None and len(request.statuses) < MOST_STATUSES:
            reason = None if effect.waiting is None else effect.waiting.reason
            request.statuses.append(StatusSeen(time.time_ns(), effect.status, reason))

    def lost(self, subject: Subject, runs: Sequence[LostRun]) -> None:
        """What other workers have published of it before they died."""
        if (request := self._of(subject)) is not None:
            request.lost = runs

    def ended(self, effect: Terminal) -> None:
        """Its outcome goes to the broker."""
        if (request := self._of(effect.subject)) is not None:
            request.ended_ns = time.time_ns()

    def acknowledged(self, effect: Terminal, status: str) -> None:
        """The broker has its outcome."""
        subject = effect.subject
        request = self._requests.pop(subject.seq, None)
        if request is None:
            return
        context, turn_before = self._context(request, subject), None
        if subject.conversation is not None:
            turn_before = self._turns.pop(subject.conversation, None)
            self._turns[subject.conversation] = context
            if len(self._turns) > MOST_LINES:
                self._turns.popitem(last=False)
        if request.sampled:
            facts = EndedRequest(
                effect=effect,
                status=status,
                worker_id=self._worker_id,
                group_id=self._group_id,
                result_topic=self._result_topic,
                context=context,
                parent=request.parent,
                ended_ns=request.ended_ns,
                acknowledged_ns=time.time_ns(),
                statuses=request.statuses,
                lost=request.lost,
                turn_before=turn_before,
                content=self._telemetry.content,
            )
            self._telemetry.end(spans_of(facts))

    def forget(self, numbers: Iterable[int]) -> None:
        """These requests are not this worker's any more."""
        for number in numbers:
            self._requests.pop(number, None)

    def _of(self, subject: Subject) -> _Request | None:
        """None of one that was forgotten among very many, while its bytes are not here."""
        found = self._requests.get(subject.seq)
        if found is None and subject.body is not None:
            found = self._begun(subject, subject.body)
            self._keep(subject, found)
        return found

    def _keep(self, subject: Subject, request: _Request) -> None:
        self._requests[subject.seq] = request
        self._telemetry.name_trace(subject.request_id, self._context(request, subject))
        if len(self._requests) > MOST_REQUESTS:
            self._requests.popitem(last=False)

    def _begun(self, subject: Subject, body: Body) -> _Request:
        parent = context_of(next((value for name, value in body.headers if name == HEADER_TRACEPARENT), None))
        made = self._telemetry.begin(parent, f"process {subject.key[0]}", "consumer", trace_id=trace_id(subject))
        return _Request(parent, made.sampled, made.trace_id)

    def _context(self, request: _Request, subject: Subject) -> SpanContext:
        found = request.contexts.get(subject.epoch)
        if found is None:
            found = SpanContext(request.trace_id, process_id(subject, self._worker_id), request.sampled)
            request.contexts[subject.epoch] = found
        return found
