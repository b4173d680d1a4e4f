"""The spans of a request that has ended on a worker: facts in, spans out. Pure; times in nanoseconds since the epoch.

A request is one `process` span with a child for each phase of at least a millisecond, one for each attempt, and one
for the publication of its outcome. An attempt of a worker that died has exported nothing: the worker that ends the
request describes it, from the first to the last that is known of it. Ids are derived, so each worker can name the
other's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from penstock.common import tracing as names
from penstock.common.tracing import Attributes, Event, Link, Span, SpanContext, derived_id
from penstock.processors.core.effects import Terminal
from penstock.processors.core.work.work import Subject
from penstock.processors.engines.base import Finished
from penstock.schemas.fixed import fixed
from penstock.schemas.records import Attempt
from penstock.schemas.texts import shortened

MS = 1_000_000
LEAST_NS = MS
"""A shorter phase has no span: a span costs more than it says."""
MOST_CHARS = 16_384
"""Of a prompt or an output in a span."""
CLOCKS_MS = 1_000
"""By so much the broker's clock may be ahead of the worker's."""
_OPERATIONS = {"embedding": "embeddings", "text_generation": "text_completion"}


class StatusSeen(NamedTuple):
    """A status that was published of a request that waits."""

    at_ns: int
    status: str
    reason: str | None


class LostRun(NamedTuple):
    """What a run published whose worker did not end it."""

    epoch: int
    attempt: int
    worker_id: str | None
    first_ms: int
    last_ms: int


@fixed
class EndedRequest:
    """`context` is that of the process span, `parent` what it came from. `ended_ns`: when its outcome was decided."""

    effect: Terminal
    status: str
    worker_id: str
    group_id: str
    result_topic: str
    context: SpanContext
    parent: SpanContext | None
    ended_ns: int
    acknowledged_ns: int
    statuses: Sequence[StatusSeen] = ()
    lost: Sequence[LostRun] = ()
    turn_before: SpanContext | None = None
    content: bool = False


class _Times(NamedTuple):
    arrived: int
    started: int
    """When it was first granted; if it never was, when it ended."""
    run: int | None
    ended: int


class _Attempt(NamedTuple):
    """An attempt before the last one."""

    number: int
    epoch: int
    worker_id: str | None
    start_ns: int
    end_ns: int
    error: str
    is_lost: bool
    device: str | None = None


def process_id(subject: Subject, worker_id: str) -> int:
    """Of the span of a request on a worker."""
    return derived_id(64, *_name_of(subject), "process", worker_id, subject.epoch)


def run_id(subject: Subject, epoch: int, attempt: int) -> int:
    """Of the span of a run, on whatever worker."""
    return derived_id(64, *_name_of(subject), "run", epoch, attempt)


def trace_id(subject: Subject) -> int:
    """Of a request that came without a trace."""
    return derived_id(128, *_name_of(subject))


def _name_of(subject: Subject) -> tuple[object, ...]:
    return *subject.first_key, subject.tenant, subject.request_id


def spans_of(facts: EndedRequest) -> list[Span]:
    """All that is to be exported of a request when the broker has its outcome."""
    times = _times_of(facts)
    earlier = sorted([*_failed(facts, times), *_lost(facts)], key=lambda one: one.start_ns)
    spans = [_process(facts, times, earlier), *_phases(facts, times, earlier)]
    subject, before = facts.effect.subject, None
    for attempt in earlier:
        link = _link_to(subject, before)
        spans.append(_earlier_run(facts, attempt, link))
        before = attempt
    if times.run is not None:
        spans.append(_run(facts, times, times.run, _link_to(subject, before)))
    spans.append(_publication(facts))
    return spans


def _times_of(facts: EndedRequest) -> _Times:
    timings, ended = facts.effect.timings, facts.ended_ns
    if facts.effect.ran_s is None:
        run, started = None, ended
    else:
        run = ended - round(facts.effect.ran_s * 1e9)
        started = run - timings.admission_ms * MS
    return _Times(started - (timings.queued_ms + timings.load_ms) * MS, started, run, ended)


def _failed(facts: EndedRequest, times: _Times) -> Iterator[_Attempt]:
    """Attempts that failed here, before the run that ended it."""
    last_ms = (times.ended if times.run is None else times.run) // MS + 1
    for one in _history(facts):
        if one.error is None or one.started_at is None or one.ended_at is None:
            continue
        if times.run is not None and one.attempt == facts.effect.subject.attempt:
            continue  # the last run, which has a span of its own
        if one.worker_id == facts.worker_id and times.arrived // MS - 1 <= one.ended_at <= last_ms:
            start, end = max(one.started_at * MS, times.arrived), one.ended_at * MS
            epoch = facts.effect.subject.epoch
            yield _Attempt(one.attempt, epoch, one.worker_id, start, end, one.error.code, False, one.device)


def _lost(facts: EndedRequest) -> Iterator[_Attempt]:
    """Attempts whose workers died: by the crash journal, and by what they published."""
    subject = facts.effect.subject
    journaled = {
        one.attempt: one
        for one in _history(facts)
        if one.ended_at is None and (one.started_at or 0) >= subject.origin.append_time_ms - CLOCKS_MS
    }
    for run in facts.lost:
        known = journaled.pop(run.attempt, None)
        start = run.first_ms if known is None or known.started_at is None else min(run.first_ms, known.started_at)
        yield _Attempt(run.attempt, run.epoch, run.worker_id, start * MS, run.last_ms * MS, "worker_lost", True)
    for one in journaled.values():
        at = (one.started_at or 0) * MS
        yield _Attempt(one.attempt, -1, one.worker_id, at, at, "worker_lost", True)


def _history(facts: EndedRequest) -> list[Attempt]:
    history = facts.effect.subject.history
    return [] if history is None else history.attempts


def _link_to(subject: Subject, attempt: _Attempt | None) -> tuple[Link, ...]:
    if attempt is None:
        return ()
    run = SpanContext(0, run_id(subject, attempt.epoch, attempt.number))
    return (Link(run, "continues" if attempt.is_lost else "retry_of"),)


def _process(facts: EndedRequest, times: _Times, earlier: Sequence[_Attempt]) -> Span:
    effect, subject = facts.effect, facts.effect.subject
    topic, partition, offset = subject.key
    attributes: Attributes = {
        names.SYSTEM: names.KAFKA,
        names.OPERATION: "process",
        names.DESTINATION: topic,
        names.PARTITION: str(partition),
        names.OFFSET: offset,
        names.GROUP: facts.group_id,
        **names.request_attributes(subject.request),
        names.CLASS: effect.klass,
        names.PRIORITY: subject.priority,
        names.STATUS: facts.status,
        names.WORKER: facts.worker_id,
        names.ATTEMPT: subject.attempt,
        names.EPOCH: subject.epoch,
    }
    if effect.error is not None:
        attributes[names.ERROR_TYPE] = effect.error.code
    own = min([times.arrived, *(one.start_ns for one in earlier if not one.is_lost)])
    return Span(
        name=f"process {topic}",
        kind="consumer",
        context=facts.context,
        parent=facts.parent,
        start_ns=own,
        end_ns=max(facts.acknowledged_ns, times.ended),
        attributes=attributes,
        links=() if facts.turn_before is None else (Link(facts.turn_before, "turn_after"),),
        error=None if effect.error is None else effect.error.code,
    )


def _phases(facts: EndedRequest, times: _Times, earlier: Sequence[_Attempt]) -> Iterator[Span]:
    """What it waited for, before its last run."""
    effect, timings = facts.effect, facts.effect.timings
    waits = [one for one in facts.statuses if times.arrived <= one.at_ns <= times.started]

    def phase(name: str, start: int, end: int, events: tuple[Event, ...] = ()) -> Iterator[Span]:
        start, end = max(start, times.arrived), min(end, times.ended)
        if end - start >= LEAST_NS:
            span_id = derived_id(64, facts.context.span_id, name, start)
            yield Span(
                name=name,
                context=facts.context.child(span_id),
                parent=facts.context,
                start_ns=start,
                end_ns=end,
                events=events,
            )

    reasons = (Event(one.status, one.at_ns, {names.REASON: one.reason} if one.reason else {}) for one in waits)
    yield from phase("queue", times.arrived, times.started, tuple(reasons))
    if timings.load_ms:
        loading = next((one.at_ns for one in waits if one.status == "loading_model"), None)
        start = times.started - timings.load_ms * MS if loading is None else loading
        yield from phase("load", start, min(times.started, start + timings.load_ms * MS))
    for at, one in enumerate(waits):
        if one.status == "waiting_for_memory":
            yield from phase(
                "wait for memory", one.at_ns, waits[at + 1].at_ns if at + 1 < len(waits) else times.started
            )
    granted = times.started if times.run is None or not any(not one.is_lost for one in earlier) else times.run
    if effect.prepared_s is not None:
        yield from phase("prepare", granted - round(effect.prepared_s * 1e9), granted)
    if times.run is not None and granted == times.started:
        yield from phase("admission", times.started, times.run)


def _run(facts: EndedRequest, times: _Times, start: int, links: tuple[Link, ...]) -> Span:
    effect, subject = facts.effect, facts.effect.subject
    finished: Finished | None = effect.finished
    attributes = _run_attributes(subject, subject.epoch, subject.attempt)
    events: tuple[Event, ...] = ()
    if finished is not None:
        attributes |= {names.INPUT_TOKENS: finished.prompt_tokens, names.OUTPUT_TOKENS: finished.completion_tokens}
        if finished.finish_reason is not None:
            attributes[names.FINISH_REASONS] = [finished.finish_reason]
    if (first_ms := effect.timings.first_token_ms) is not None:
        at = min(max(start, times.arrived + first_ms * MS), times.ended)
        events = (Event(names.FIRST_TOKEN, at),)
    if effect.error is not None:
        attributes[names.ERROR_TYPE] = effect.error.code
    if facts.content:
        attributes |= _content(subject, finished)
    return Span(
        name=_run_name(subject),
        context=facts.context.child(run_id(subject, subject.epoch, subject.attempt)),
        parent=facts.context,
        start_ns=start,
        end_ns=times.ended,
        attributes=attributes,
        links=_in_trace(facts, links),
        events=events,
        error=None if effect.error is None else effect.error.code,
    )


def _earlier_run(facts: EndedRequest, attempt: _Attempt, links: tuple[Link, ...]) -> Span:
    subject = facts.effect.subject
    attributes = _run_attributes(subject, attempt.epoch, attempt.number) | {names.ERROR_TYPE: attempt.error}
    if attempt.worker_id is not None:
        attributes[names.WORKER] = attempt.worker_id
    if attempt.device is not None:
        attributes[names.DEVICE] = attempt.device
    if attempt.is_lost:
        attributes[names.LOST] = True
    return Span(
        name=_run_name(subject),
        context=facts.context.child(run_id(subject, attempt.epoch, attempt.number)),
        parent=facts.parent if attempt.is_lost else facts.context,
        start_ns=attempt.start_ns,
        end_ns=attempt.end_ns,
        attributes=attributes,
        links=_in_trace(facts, links),
        error="its worker was lost" if attempt.is_lost else attempt.error,
    )


def _in_trace(facts: EndedRequest, links: tuple[Link, ...]) -> tuple[Link, ...]:
    return tuple(Link(facts.context.child(one.context.span_id), one.relation) for one in links)


def _operation(subject: Subject) -> str:
    if subject.request.payload.get("messages"):
        return "chat"
    return _OPERATIONS.get(subject.task, subject.task)


def _run_name(subject: Subject) -> str:
    return f"{_operation(subject)} {subject.lane}"


def _run_attributes(subject: Subject, epoch: int, attempt: int) -> Attributes:
    return {
        names.GEN_AI_OPERATION: _operation(subject),
        names.REQUEST_MODEL: subject.request.model or subject.lane,
        names.RESPONSE_MODEL: subject.lane,
        names.ATTEMPT: attempt,
        names.EPOCH: epoch,
    }


def _content(subject: Subject, finished: Finished | None) -> Attributes:
    payload = subject.request.payload
    given: Any = payload.get("messages") or payload.get("prompt") or payload.get("input")
    found: Attributes = {} if given is None else {names.INPUT: shortened(json.dumps(given), MOST_CHARS)}
    if finished is not None and (text := finished.output.get("text")) is not None:
        found[names.OUTPUT] = shortened(json.dumps([{"role": "assistant", "content": text}]), MOST_CHARS)
    return found


def _publication(facts: EndedRequest) -> Span:
    return Span(
        name=f"send {facts.result_topic}",
        kind="producer",
        context=facts.context.child(derived_id(64, facts.context.span_id, "send")),
        parent=facts.context,
        start_ns=facts.ended_ns,
        end_ns=facts.acknowledged_ns,
        attributes={names.SYSTEM: names.KAFKA, names.OPERATION: "send", names.DESTINATION: facts.result_topic},
    )
