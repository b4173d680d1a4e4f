"""Spans of the gateway, the bridge, the webhooks and the summarizer: records on their way to Kafka, messages, calls of
receivers, summaries.

Each asks whether traces are on, once.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from urllib.parse import urlsplit

from penstock.common import tracing as names
from penstock.common.group_consumer import Read
from penstock.common.reader import Headers
from penstock.common.telemetry import Telemetry, active
from penstock.common.tracing import Attributes, Link, Span, SpanContext, context_of, derived_id, send_span
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import InferenceRequest, Place, WebhookDelivery
from penstock.schemas.topics import HEADER_TRACEPARENT, TopicNames


class Sending:
    """A request on its way to its topic."""

    __slots__ = ("_attributes", "_begun_ns", "_context", "_links", "_parent", "_telemetry", "_topic")

    def __init__(
        self,
        telemetry: Telemetry,
        request: InferenceRequest,
        topic: str,
        parent: SpanContext | None,
        links: tuple[Link, ...],
    ) -> None:
        self._telemetry, self._topic, self._parent, self._links = telemetry, topic, parent, links
        self._context = telemetry.begin(parent, f"send {topic}", "producer")
        self._attributes = names.request_attributes(request)
        self._begun_ns = time.time_ns()
        telemetry.name_trace(request.request_id, self._context)

    @classmethod
    def of(
        cls,
        request: InferenceRequest,
        topics: TopicNames,
        traceparent: str | None,
        links: tuple[Link, ...] = (),
    ) -> Sending | None:
        """None while traces are off."""
        if (telemetry := active()) is None:
            return None
        topic = topics.request(request.task, request.priority, request.pool)
        return cls(telemetry, request, topic, context_of(traceparent), links)

    @property
    def traceparent(self) -> str:
        """For the header of the record."""
        return self._context.traceparent

    def failed(self, error: BaseException) -> None:
        self.ended(Place(topic=self._topic, partition=-1, offset=-1), error)

    def ended(self, place: Place, error: BaseException | None = None) -> None:
        """`place` is where it stands, if there is no error."""
        if not self._context.sampled:
            return
        why = error.code if isinstance(error, PenstockError) else type(error).__name__
        attributes = self._attributes if error is None else self._attributes | {names.ERROR_TYPE: why}
        span = send_span(
            self._context,
            self._parent,
            place,
            (self._begun_ns, time.time_ns()),
            attributes,
            links=self._links,
            error=None if error is None else why,
        )
        self._telemetry.end((span,))


@contextmanager
def watched(*sendings: Sending | None) -> Generator[None]:
    """Around the sending of these: what is raised ends them."""
    try:
        yield
    except BaseException as error:
        for sending in sendings:
            if sending is not None:
                sending.failed(error)
        raise


def batch_link(tenant: str, batch_id: str) -> tuple[Link, ...]:
    """From the requests of a batch to the batch."""
    return (Link(derived_context(tenant, batch_id), "batch"),)


def derived_context(*parts: str) -> SpanContext:
    """Every process derives the same, so whichever ends the work can describe it."""
    return SpanContext(derived_id(128, *parts), derived_id(64, *parts))


def end_batch(tenant: str, batch_id: str, endpoint: str, began_ms: int, attributes: Attributes) -> None:
    """A batch is over: its span is the one that its requests are linked to."""
    attributes = {names.TENANT: tenant, **attributes}
    _end_root(f"batch {endpoint}", derived_context(tenant, batch_id), began_ms * 1_000_000, attributes)


SUMMARY = "summary"


def summary_traceparent(tenant: str, request_id: str) -> str | None:
    """For the header of a request for a summary, by whichever summarizer sends it. None while traces are off."""
    if (telemetry := active()) is None:
        return None
    return _root(telemetry, SUMMARY, derived_context(tenant, request_id)).traceparent


def end_summary(tenant: str, conversation_id: str, request_id: str, began_ns: int, status: str) -> None:
    """A request for a summary is over."""
    attributes: Attributes = {
        names.TENANT: tenant,
        names.CONVERSATION: conversation_id,
        names.REQUEST_ID: request_id,
        names.STATUS: status,
    }
    error = None if status == "completed" else status
    _end_root(SUMMARY, derived_context(tenant, request_id), began_ns, attributes, error)


def _root(telemetry: Telemetry, name: str, derived: SpanContext) -> SpanContext:
    """The context with what the sampler says of it."""
    return derived._replace(sampled=telemetry.begin(None, name, "internal", trace_id=derived.trace_id).sampled)


def _end_root(name: str, derived: SpanContext, began_ns: int, attributes: Attributes, error: str | None = None) -> None:
    """Work is over whose span has no parent, and which its requests are children of or linked to."""
    if (telemetry := active()) is None:
        return
    span = Span(
        name=name,
        context=_root(telemetry, name, derived),
        parent=None,
        start_ns=began_ns,
        end_ns=time.time_ns(),
        attributes=attributes,
        error=error,
    )
    telemetry.end((span,))


class Call:
    """A call of a webhook's receiver."""

    def __init__(self, telemetry: Telemetry, delivery: WebhookDelivery, headers: Headers) -> None:
        self._telemetry, self._delivery = telemetry, delivery
        self._parent = parent_in(headers)
        self._context = telemetry.begin(self._parent, "POST", "client")
        self._begun_ns = time.time_ns()
        telemetry.name_trace(delivery.request_id, self._context)

    @property
    def header(self) -> tuple[bytes, bytes]:
        return HEADER_TRACEPARENT.encode(), self._context.traceparent.encode()

    def ended(self, status_code: int | None, error: str | None) -> None:
        """`error` is why there is no answer."""
        delivery = self._delivery
        attributes: Attributes = {
            names.METHOD: "POST",
            names.SERVER_ADDRESS: urlsplit(delivery.url).hostname or "",
            names.REQUEST_ID: delivery.request_id,
            names.TENANT: delivery.tenant,
            names.ATTEMPT: len(delivery.attempts) + 1,
        }
        if status_code is not None:
            attributes[names.STATUS_CODE] = status_code
        why = error or (str(status_code) if status_code is None or status_code >= 400 else None)
        span = Span(
            name=f"webhook {delivery.type}",
            kind="client",
            context=self._context,
            parent=self._parent,
            start_ns=self._begun_ns,
            end_ns=time.time_ns(),
            attributes=attributes,
            error=why,
        )
        self._telemetry.end((span,))


def begin_call(delivery: WebhookDelivery, headers: Headers) -> Call | None:
    """`headers` are those of the event's record. None while traces are off."""
    return None if (telemetry := active()) is None else Call(telemetry, delivery, headers)


TAKEN: ContextVar[str | None] = ContextVar("taken", default=None)
"""In the task of a message of a queue: the traceparent of its span."""


@contextmanager
def taken(read: Read) -> Generator[None]:
    """Around one try of a message of a queue: what it sends belongs to the span of the try."""
    if (telemetry := active()) is None:
        yield
        return
    parent, name, begun_ns = parent_in(read.headers), f"process {read.tp[0]}", time.time_ns()
    context, failure = telemetry.begin(parent, name, "consumer"), None
    token = TAKEN.set(context.traceparent)
    try:
        yield
    except BaseException as error:
        failure = type(error).__name__
        raise
    finally:
        TAKEN.reset(token)
        attributes: Attributes = {
            names.SYSTEM: names.KAFKA,
            names.OPERATION: "process",
            names.DESTINATION: read.tp[0],
            names.PARTITION: str(read.tp[1]),
            names.OFFSET: read.offset,
        }
        span = Span(
            name=name,
            kind="consumer",
            context=context,
            parent=parent,
            start_ns=begun_ns,
            end_ns=time.time_ns(),
            attributes=attributes,
            error=failure,
        )
        telemetry.end((span,))


def parent_in(headers: Headers) -> SpanContext | None:
    """The context that a record names."""
    return context_of(next((value for name, value in headers if name == HEADER_TRACEPARENT), None))
