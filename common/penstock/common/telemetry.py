"""Exports spans by OpenTelemetry's SDK, off by default. Nothing else imports OpenTelemetry.

One exporter serves a process, as one root logger does: `tracing` opens it, `active` finds it. A thread of the SDK sends
spans in batches. A collector that is away or slow costs spans, which are counted, and never time.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.common.release import release
from penstock.common.tracing import RELATION, Kind, Span, SpanContext, Value, new_id
from penstock.schemas.logs import Fields

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from penstock.common.configuration import TelemetrySection

logger = logging.getLogger(__name__)

FLUSH_S = 3.0
"""A stop waits so long for the collector."""
LOG_S = 30.0
"""Between two log lines about spans that were lost."""
LONGEST_KNOWN = 200
"""Characters of an attribute's value. Longer ones, as prompts, do not occur again, and would fill the memory."""
REMEMBERED = 20_000
"""Requests whose trace log lines name."""

_active: Telemetry | None = None


def active() -> Telemetry | None:
    """The exporter of this process; None while traces are off."""
    return _active


@contextmanager
def tracing(section: TelemetrySection, process: str) -> Generator[None]:
    """Export the spans of this process, if the settings say so. At the end the rest is sent within `FLUSH_S`."""
    global _active
    off = {os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true", os.environ.get("OTEL_TRACES_EXPORTER") == "none"}
    if not section.traces or True in off:
        yield
        return
    _active = Telemetry(process, content=section.content)
    names = _NamesTraces(_active)
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(names)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(names)
        closing, _active = _active, None
        closing.close()


def register(registry: CollectorRegistry) -> None:
    """Have the counter of spans among the metrics of this process, if it exports any."""
    if _active is not None:
        registry.register(_active)


def current_traceparent() -> str | None:
    """Of the span that the calling service is in, if it uses OpenTelemetry."""
    if (api := sys.modules.get("opentelemetry.trace")) is None:
        return None
    found = api.get_current_span().get_span_context()
    return SpanContext(found.trace_id, found.span_id, found.trace_flags.sampled).traceparent if found.is_valid else None


class Telemetry:
    """Of one process. `content`: spans may hold prompts and outputs. Calls are on the event loop."""

    def __init__(self, process: str, *, content: bool) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self.content = content
        # Their lines repeat for each batch; `Batches` says the same once in a while.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        instance = f"{socket.gethostname()}:{os.getpid()}"
        resource = Resource.create({"service.version": release(), "service.instance.id": instance})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": f"penstock-{process}"}))
        self._sampling = _Sampling(TracerProvider(resource=resource, shutdown_on_exit=False).sampler)
        self._batches = _batches(resource)
        self._traces: OrderedDict[str, int] = OrderedDict()

    def begin(self, parent: SpanContext | None, name: str, kind: Kind, *, trace_id: int | None = None) -> SpanContext:
        """The context of a new span, in a trace of its own (`trace_id`, if given) unless it has a parent."""
        trace_id = parent.trace_id if parent is not None else trace_id or new_id(128)
        return SpanContext(trace_id, new_id(64), self._sampling.takes(parent, trace_id, name, kind))

    def end(self, spans: Iterable[Span]) -> None:
        """Export spans that have ended. Never blocks."""
        for span in spans:
            if span.context.sampled:
                self._batches.add(span)

    def name_trace(self, request_id: str, context: SpanContext) -> None:
        """From now on log lines about this request name its trace."""
        self._traces[request_id] = context.trace_id
        if len(self._traces) > REMEMBERED:
            self._traces.popitem(last=False)

    def trace_of(self, request_id: str) -> int | None:
        return self._traces.get(request_id)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus, on any thread."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily("penstock_trace_spans", "Spans by what became of them.", labels=["outcome"])
        for outcome, count in (("exported", self._batches.exported), ("dropped", self._batches.dropped)):
            family.add_metric([outcome], count)
        yield family

    def close(self) -> None:
        """Send the rest. Blocks for `FLUSH_S` at most."""
        closing = threading.Thread(target=self._batches.shutdown, name="telemetry", daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            self._batches.exporter.shutdown()  # ends the wait between two tries
        if self._batches.dropped:
            logger.warning("telemetry.closed dropped=%d", self._batches.dropped)


class _Sampling:
    """The SDK's sampler, as OTEL_TRACES_SAMPLER names it."""

    def __init__(self, sampler: Any) -> None:
        from opentelemetry import trace

        self._sampler, self._trace = sampler, trace
        self._asks_parent = (
            os.environ.get("OTEL_TRACES_SAMPLER", "parentbased").strip().lower().startswith("parentbased")
        )
        self._kinds = {kind.name.lower(): kind for kind in trace.SpanKind}
        self._flags = trace.TraceFlags(0), trace.TraceFlags(1)

    def takes(self, parent: SpanContext | None, trace_id: int, name: str, kind: Kind) -> bool:
        trace, context = self._trace, None
        if parent is not None and self._asks_parent:
            return parent.sampled  # what the sampler answers, without the values that it asks for
        if parent is not None:
            remote = trace.SpanContext(parent.trace_id, parent.span_id, True, self._flags[parent.sampled])
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        return self._sampler.should_sample(context, trace_id, name, self._kinds[kind]).decision.is_sampled()


class _Waiting(NamedTuple):
    """A span in the SDK's queue, which asks for a context of its own. All that come here are sampled."""

    span: Span
    context: Any


@lru_cache(REMEMBERED)
def _log_failure(kind: type[Exception]) -> None:
    """Once for each kind of error, whose message may hold content."""
    logger.error("telemetry.export_failed error=%s", kind.__name__)


def _delimited(number: int, content: bytes) -> bytes:
    """A field of protobuf that has a length: of a message, a text or bytes. `number` is at most 15."""
    head, length = bytearray((number << 3 | 2,)), len(content)
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + content


# The fields of a span that each span has, and its parent, as protobuf has them: tag, length, content.
_IDS, _PARENT = struct.Struct("2s16s2s8s"), struct.Struct("2s8s")
_TIMES = struct.Struct("<cQcQ6s")


def _encoder(resource: Any) -> Callable[[Iterable[_Waiting]], tuple[bytes, int]]:
    """Makes a request of OTLP of spans, ten times as fast as the SDK does. Returns how many it holds, too:
    a span that protobuf cannot hold, such as one with half a surrogate pair, is left out.

    The messages of protobuf are written where they are rare or made once. What each span has is written as bytes: two
    messages in a row are one message to protobuf. Names and attributes that occur again are encoded once.
    """
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message

    kinds = {name.removeprefix("SPAN_KIND_").lower(): number for name, number in Message.SpanKind.items()}

    def any_value(value: Value | tuple[str, ...]) -> AnyValue:
        match value:
            case bool():
                return AnyValue(bool_value=value)
            case str():
                return AnyValue(string_value=value)
            case int():
                return AnyValue(int_value=value)
            case float():
                return AnyValue(double_value=value)
            case _:
                return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=one) for one in value]))

    def key_values(attributes: Mapping[str, Value]) -> list[KeyValue]:
        return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]

    @lru_cache(REMEMBERED)
    def attribute(key: str, kind: type, value: Value | tuple[str, ...]) -> bytes:  # 1 == True
        return Message(attributes=[KeyValue(key=key, value=any_value(value))]).SerializeToString()

    @lru_cache(REMEMBERED)
    def named(name: str, kind: Kind) -> bytes:
        return Message(name=name, kind=kinds[kind]).SerializeToString()

    def rare(span: Span) -> bytes:
        message = Message()
        for event in span.events:
            message.events.add(name=event.name, time_unix_nano=event.at_ns, attributes=key_values(event.attributes))
        for link in span.links:
            ids = {
                "trace_id": link.context.trace_id.to_bytes(16, "big"),
                "span_id": link.context.span_id.to_bytes(8, "big"),
            }
            message.links.add(**ids, attributes=key_values({RELATION: link.relation}))
        if span.error is not None:
            message.status.CopyFrom(Status(code=Status.STATUS_CODE_ERROR, message=span.error))
        return message.SerializeToString()

    def encoded(span: Span) -> bytes:
        context, parent = span.context, span.parent
        pieces = [
            _IDS.pack(
                b"\x0a\x10", context.trace_id.to_bytes(16, "big"), b"\x12\x08", context.span_id.to_bytes(8, "big")
            ),
            b"" if parent is None else _PARENT.pack(b"\x22\x08", parent.span_id.to_bytes(8, "big")),
            named(span.name, span.kind),
            _TIMES.pack(b"\x39", span.start_ns, b"\x41", max(span.start_ns, span.end_ns), b"\x85\x01\x01\0\0\0"),
        ]
        for key, value in span.attributes.items():
            known = tuple(value) if isinstance(value, list) else value
            is_long = isinstance(known, str) and len(known) > LONGEST_KNOWN
            pieces.append((attribute.__wrapped__ if is_long else attribute)(key, type(known), known))
        if span.events or span.links or span.error is not None:
            pieces.append(rare(span))
        return b"".join(pieces)

    of_process = ResourceSpans(resource=Resource(attributes=key_values(dict(resource.attributes)))).SerializeToString()
    of_scope = ScopeSpans(scope=InstrumentationScope(name="penstock", version=release())).SerializeToString()

    def encode(waiting: Iterable[_Waiting]) -> tuple[bytes, int]:
        pieces = [of_scope]
        for one in waiting:
            try:
                pieces.append(_delimited(2, encoded(one.span)))
            except Exception as error:
                _log_failure(type(error))
        return _delimited(1, of_process + _delimited(2, b"".join(pieces))), len(pieces) - 1

    return encode


def _batches(resource: Any) -> Any:
    """The SDK's batches (OTEL_BSP_… bounds them), with the spans counted that the collector took and did not take."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    from opentelemetry.trace import SpanContext as Context
    from opentelemetry.trace import TraceFlags

    sampled = Context(1, 1, False, TraceFlags(1))

    class Exporter(OTLPSpanExporter):
        """The SDK's client, with its retries, headers and certificates, behind an encoder of our own."""

        def __init__(self) -> None:
            super().__init__()
            self._encode = _encoder(resource)
            self._send = self._client.export
            self.exported = self.failed = 0

        def export(self, spans: Any) -> SpanExportResult:
            taken = 0
            try:
                body, held = self._encode(spans)
                if self._send(body).success:
                    taken = held
            except Exception as error:
                _log_failure(type(error))
            self.exported += taken
            self.failed += len(spans) - taken
            return SpanExportResult.SUCCESS if taken else SpanExportResult.FAILURE

    class Batches(BatchSpanProcessor):
        """Spans beyond the bound of the queue are dropped: the newest, so that whole traces are left."""

        def __init__(self) -> None:
            self.exporter = Exporter()
            super().__init__(self.exporter)
            self._room = self._default_max_queue_size()
            self._added = self._full = 0
            self._logged_at, self._logged = float("-inf"), 0

        @property
        def exported(self) -> int:
            return self.exporter.exported

        @property
        def dropped(self) -> int:
            return self.exporter.failed + self._full

        def add(self, span: Span) -> None:
            if self._added - self.exporter.exported - self.exporter.failed >= self._room:
                self._full += 1
            else:
                self._added += 1
                self.on_end(_Waiting(span, sampled))  # type: ignore[arg-type]
            if self.dropped > self._logged and time.monotonic() - self._logged_at >= LOG_S:
                self._logged_at, self._logged = time.monotonic(), self.dropped
                logger.warning("telemetry.spans_dropped total=%d: the collector is away or slow", self.dropped)

    return Batches()


class _NamesTraces(logging.Filter):
    """Adds the trace to each line that names a request."""

    _REQUEST = re.compile(r"\brequest_id=(\S+)")

    def __init__(self, telemetry: Telemetry) -> None:
        super().__init__()
        self._telemetry = telemetry

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, Fields):  # it has the trace among them
            return True
        try:
            message = record.getMessage()
        except Exception:  # its handler reports a line that cannot be formatted
            return True
        found = self._REQUEST.search(message) if "request_id=" in message else None
        trace_id = None if found is None else self._telemetry.trace_of(found[1])
        if trace_id is not None:
            record.trace_id = f"{trace_id:032x}"
        return True
