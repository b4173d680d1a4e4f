"""A collector of traces: a real server of OTLP over HTTP that reads what comes by the official protobuf classes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from kit.http_server import Answer, Call, serving_http
from support import wait_until


@dataclass(frozen=True)
class Seen:
    """A span, with the process that exported it."""

    span: Span
    process: str

    @property
    def id(self) -> bytes:
        return self.span.span_id

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return {one.key: value_of(one.value) for one in self.span.attributes}

    @property
    def failed(self) -> bool:
        return self.span.status.code == Status.STATUS_CODE_ERROR

    @property
    def links(self) -> dict[str, bytes]:
        """The ids of linked spans, by what they are to this one."""
        return {value_of(link.attributes[0].value): link.span_id for link in self.span.links}

    @property
    def times(self) -> tuple[int, int]:
        return self.span.start_time_unix_nano, self.span.end_time_unix_nano


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(one) for one in found.values] if kind == "array_value" else found


@dataclass
class Collector:
    seen: list[Seen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    url: str = ""

    def take(self, call: Call) -> Answer:
        assert call.path == "/v1/traces"
        self.bodies.append(call.body)
        self.headers.append(dict(call.headers))
        for of_process in ExportTraceServiceRequest.FromString(call.body).resource_spans:
            resource = {one.key: value_of(one.value) for one in of_process.resource.attributes}
            for scope in of_process.scope_spans:
                self.seen += [Seen(span, str(resource["service.name"])) for span in scope.spans]
        return 200, b"", {"content-type": "application/x-protobuf"}

    def trace(self, trace_id: str) -> list[Seen]:
        found = [one for one in list(self.seen) if one.span.trace_id.hex() == trace_id]
        return sorted(found, key=lambda one: one.times)

    def wait_for(self, trace_id: str, *names: str, deadline_s: float = 40) -> list[Seen]:
        """The spans of a trace when each of these names is among them."""

        def complete() -> bool:
            found = [one.name for one in self.trace(trace_id)]
            return all(found.count(name) >= names.count(name) for name in names)

        wait_until(complete, deadline_s, lambda: f"the trace has {[one.name for one in self.trace(trace_id)]}")
        return self.trace(trace_id)


@contextmanager
def collecting(port: int = 0) -> Generator[Collector]:
    collector = Collector()
    with serving_http(collector.take, port) as server:
        collector.url = server.url
        yield collector
