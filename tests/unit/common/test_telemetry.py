"""Spans on their way out of a process: what is counted, what a stop waits for, what log lines and callers are told."""

from __future__ import annotations

import gc
import logging
import sys
import time
import tracemalloc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest
from opentelemetry import trace

from kit.collector import Collector, collecting
from kit.http_server import serving_http
from penstock.common import telemetry
from penstock.common.configuration import TelemetrySection
from penstock.common.tracing import Span, SpanContext, context_of
from penstock.schemas.logs import LineFormatter
from support import wait_until

ON = TelemetrySection(traces=True)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        yield found


@contextmanager
def exporting() -> Generator[telemetry.Telemetry]:
    with telemetry.tracing(ON, "worker"):
        found = telemetry.active()
        assert found is not None
        yield found


def span(context: SpanContext) -> Span:
    return Span(name="s", context=context, parent=None, start_ns=1, end_ns=2, attributes={"a": ["x", "y"]})


def test_a_stop_sends_what_waits(collector: Collector) -> None:
    with exporting() as found:
        context = found.begin(None, "s", "internal")
        found.end([span(context)])
    assert telemetry.active() is None
    (one,) = collector.seen
    assert (one.process, one.attributes, one.times) == ("penstock-worker", {"a": ["x", "y"]}, (1, 2))
    assert (one.span.trace_id, one.id) == (context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big"))


@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_the_standard_variables_turn_it_off(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*variable.split("=", 1))
    with telemetry.tracing(ON, "worker"):
        assert telemetry.active() is None


def test_the_sampler_is_that_of_the_environment(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    with exporting() as found:
        for parent, sampled in ((None, False), (SpanContext(1, 2), True), (SpanContext(1, 2, False), False)):
            assert found.begin(parent, "s", "internal").sampled is sampled


def test_a_collector_that_hangs_holds_no_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.2)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    asked: list[float] = []

    def hang(_: object) -> tuple[int, bytes]:
        asked.append(time.monotonic())
        wait_until(lambda: stopped, 20, lambda: "the stop waits for the collector")
        return 200, b""

    stopped: list[float] = []
    with serving_http(hang) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        with exporting() as found:
            found.end([span(found.begin(None, "s", "internal"))])
            wait_until(lambda: asked, 10, lambda: "nothing was sent")
            began = time.monotonic()
        stopped.append(time.monotonic())
    assert stopped[0] - began < 5


def test_spans_beyond_the_queue_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    with exporting() as found:
        found.end(span(found.begin(None, "s", "internal")) for _ in range(20))
        (family,) = found.collect()
        counts = {one.labels["outcome"]: one.value for one in family.samples}
    assert counts["dropped"] >= 16 - 4
    assert counts["exported"] == 0


@pytest.mark.parametrize("bad", ["\ud800", 1 << 64])
def test_a_span_that_cannot_be_encoded_costs_no_other(bad: str | int, collector: Collector) -> None:
    with exporting() as found:
        good = span(found.begin(None, "s", "internal"))
        found.end([good, replace(good, attributes={"a": bad}), good])
    (family,) = found.collect()
    counts = {one.labels["outcome"]: one.value for one in family.samples}
    assert (len(collector.seen), counts) == (2, {"exported": 2, "dropped": 1})


def test_contents_are_not_kept(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes that occur again are encoded once. Prompts of 20,000 requests would be a third of a gigabyte."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with exporting() as found:
        one = span(found.begin(None, "s", "internal"))
        tracemalloc.start()
        found.end(replace(one, attributes={"content": f"{number} " * 4_000}) for number in range(200))
        wait_until(lambda: len(collector.seen) == 200, 30, lambda: f"{len(collector.seen)} came")
        collector.seen.clear()
        collector.bodies.clear()

        def kept() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        # The collector's thread may still hold the last message.
        wait_until(lambda: kept() < 1_000_000, 10, lambda: f"{kept()} bytes are kept")
        tracemalloc.stop()


def test_an_export_that_raises_is_counted(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves its room in the queue to later spans."""
    monkeypatch.setattr("opentelemetry.exporter.otlp.common.http._OTLPHTTPClient.export", Mock(side_effect=OSError))
    with exporting() as found:
        found.end([span(found.begin(None, "s", "internal"))])
    (family,) = found.collect()
    assert [one.value for one in family.samples] == [0, 1]


def test_log_lines_of_a_request_name_its_trace(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(LineFormatter().format(record).partition(" penstock.test ")[2])

    handler = Keeping()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with exporting() as found:
        found.name_trace("r1", SpanContext(0xAB, 1))
        for request_id in ("r1", "r2"):
            logging.getLogger("penstock.test").warning("run.failed request_id=%s code=x", request_id)
        monkeypatch.setattr(handler, "emit", lambda _: lines.append("malformed"))
        logging.getLogger("penstock.test").warning("%d", "x")
    assert lines == [
        f"run.failed request_id=r1 code=x trace_id={0xAB:032x}",
        "run.failed request_id=r2 code=x",
        "malformed",
    ]


def test_a_service_that_uses_opentelemetry_passes_on_its_span() -> None:
    assert telemetry.current_traceparent() is None
    parent = trace.NonRecordingSpan(trace.SpanContext(1, 2, False, trace.TraceFlags(1)))
    with trace.use_span(parent):
        assert context_of(telemetry.current_traceparent()) == SpanContext(1, 2)


@pytest.mark.parametrize("missing", ["sdk.trace.export", "exporter.otlp.proto.http.trace_exporter"])
def test_without_the_extra_the_error_names_it(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.{missing}", None)
    with pytest.raises(ValueError, match=r"install penstock\[telemetry\]"):
        TelemetrySection(traces=True)
    assert not TelemetrySection().traces
