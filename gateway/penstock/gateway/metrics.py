"""The gateway's Prometheus metrics: what it sees on the topics, counted, and its own state, read when scraped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.common.labels import BoundedLabel
from penstock.gateway.http_metrics import HttpMetrics
from penstock.schemas.records import ResultEvent, StatusEvent, Timings

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
WAITS_OF_TENANTS = (0.1, 1, 10, 60, 600)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
MOST_TENANTS = 100
"""Tenants with a label of their own: the first ones; the others are `other` together."""


class OutcomeMetrics:
    """Every gateway sees every outcome: sums over gateways count it more than once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Any:
            return cache(Counter(f"penstock_{name}", text, labels, registry=registry).labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Any:
            return cache(Histogram(f"penstock_{name}", text, labels, buckets=buckets, registry=registry).labels)

        self._requests = counter("requests", "Outcomes seen.", "task", "outcome")
        self._tokens = counter("tokens", "Tokens of outcomes seen.", "kind")
        self._of_model = counter("model_requests", "Outcomes seen, by the model that ran.", "model", "outcome")
        self._model_tokens = counter("model_tokens", "Tokens of outcomes seen, by model.", "model", "kind")
        self._of_tenant = counter("tenant_requests", "Outcomes seen, by tenant.", "tenant", "outcome")
        self._tenant_tokens = counter("tenant_tokens", "Tokens of outcomes seen, by tenant.", "tenant", "kind")
        self._wait = histogram("wait_seconds", "From accepted to running.", SECONDS, "class", "task", "model")
        self._run = histogram("run_seconds", "From running to the outcome.", SECONDS, "task", "model")
        text = "From accepted to running, by tenant."
        self._tenant_wait = histogram("tenant_wait_seconds", text, WAITS_OF_TENANTS, "tenant")
        text = "From a worker's taking it to the first token."
        self._first_token = histogram("first_token_seconds", text, SECONDS, "model")
        text = "Mean time between the tokens of a request."
        self._token_gap = histogram("token_gap_seconds", text, TOKEN_SECONDS, "model")
        self._dead = Counter("penstock_dlq", "Requests that ended dead-lettered, seen.", registry=registry)
        self._tasks, self._models, self.tenants = BoundedLabel(), BoundedLabel(), BoundedLabel(MOST_TENANTS)

    def count(self, event: ResultEvent, klass: str) -> None:
        """Count the terminal event that became the outcome of a request of this class; call it once per request."""
        outcome, tenant = event.status or "unknown", self.tenants.of(event.tenant)
        model = self._models.of(event.model)
        self._requests(event.task, outcome).inc()
        self._of_model(model, outcome).inc()
        self._of_tenant(tenant, outcome).inc()
        if event.status == "dead_lettered":
            self._dead.inc()
        if event.usage is not None:
            counts = {"prompt": event.usage.prompt_tokens, "completion": event.usage.completion_tokens}
            for kind, tokens in counts.items():
                self._tokens(kind).inc(tokens)
                self._model_tokens(model, kind).inc(tokens)
                self._tenant_tokens(tenant, kind).inc(tokens)
        if (times := event.timings) is None:
            return
        task, waited_s = self._tasks.of(event.task), (times.queued_ms + times.admission_ms + times.load_ms) / 1000
        self._wait(klass, task, model).observe(waited_s)
        self._run(task, model).observe(times.run_ms / 1000)
        self._tenant_wait(tenant).observe(waited_s)
        if times.first_token_ms is not None:
            self._first_token(model).observe(times.first_token_ms / 1000)
            if event.usage is not None and event.usage.completion_tokens > 1:
                self._token_gap(model).observe(_gap_s(times, event.usage.completion_tokens))


def _gap_s(times: Timings, tokens: int) -> float:
    """The time behind the first token, shared by the others."""
    assert times.first_token_ms is not None
    whole_ms = times.queued_ms + times.admission_ms + times.load_ms + times.run_ms
    return max(0, whole_ms - times.first_token_ms) / (tokens - 1) / 1000


# Gauges of the times at which counters began: nobody reads them, and they double the series.
disable_created_metrics()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


ModelQueue = tuple[str, str, str]
"""(class, model, pool); the pool is empty for the common one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gauges:
    """What the gateway knows about the present; depths in requests, ages in seconds, both by priority class."""

    queue_depth: Mapping[str, int] = field(default_factory=dict[str, int])
    oldest_age_s: Mapping[str, float] = field(default_factory=dict[str, float])
    model_depth: Mapping[ModelQueue, int] = field(default_factory=dict[ModelQueue, int])
    model_oldest_age_s: Mapping[ModelQueue, float] = field(default_factory=dict[ModelQueue, float])
    paused: Collection[ModelQueue] = frozenset()
    """Those of which nothing starts: no worker is needed for them."""
    inflight: int = 0
    streams: int = 0
    ws_clients: int = 0
    device_memory: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Bytes by (device, kind), as workers tell; devices of one name are added up."""
    running: Mapping[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Requests that run, by model and pool."""


class GatewayMetrics:
    """One per gateway, with a registry of its own. Counters tell what this gateway has seen since it started.

    Every gateway sees every outcome: sums over gateways count it more than once.
    """

    def __init__(self, read_gauges: Callable[[], Gauges] = Gauges) -> None:
        self.registry = CollectorRegistry()
        self.read_gauges = read_gauges
        self.read_letters: Callable[[], Mapping[str, int]] = dict
        """Dead letters that lie on their topic, by reason."""
        self.read_held_records: Callable[[], Mapping[str, int]] = dict
        """Records behind open transactions, by topic."""
        self.read_records: Callable[[], Mapping[str, int]] = dict
        """Records of the topics that were read, by what became of them."""
        self.read_batches: Callable[[], Mapping[str, int]] = dict
        """Batches that this gateway runs, by what they wait for; under "" those that wait for nothing."""
        self.read_swept: Callable[[], tuple[int, Mapping[str, int]]] = lambda: (0, {})
        """Conversations that a sweep has still to look at, and what became of those that were due."""
        lines = Counter("penstock_batch_lines", "Lines of batches ended here.", ["result"], registry=self.registry)
        self._completed_lines, self._failed_lines = lines.labels(result="completed"), lines.labels(result="failed")
        self.read_problems: Callable[[], Mapping[tuple[str, str, str], int]] = lambda: {("gateway_behind", "", ""): 1}
        """Problems by (problem, subject, pool). Before it has connected, a gateway knows of none but this."""
        self.outcomes = OutcomeMetrics(self.registry)
        self.http = HttpMetrics(self.registry, self.outcomes.tenants)
        self._retries = Counter("penstock_retries", "Attempts after the first, seen.", registry=self.registry)
        # Counted by each worker for itself; here so that every name is known on every port.
        for name, text in (("loads", "Models loaded, counted by workers."), ("unloads", "Models ended, likewise.")):
            Counter(f"penstock_model_{name}", text, ["model"], registry=self.registry)
        self.registry.register(_GaugeCollector(self))

    def on_batch_line(self, *, completed: bool) -> None:
        """Count a line that ended in a batch that this gateway runs."""
        (self._completed_lines if completed else self._failed_lines).inc()

    def on_status(self, event: StatusEvent) -> None:
        """Count a status that was new to its request."""
        if event.status == "retrying":
            self._retries.inc()

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)


class _GaugeCollector(Collector):
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        read, gauges = self._metrics, self._metrics.read_gauges()
        of_model = ["class", "model", "pool"]
        depth, paused = gauges.model_depth, {queue: int(queue in gauges.paused) for queue in gauges.model_depth}
        families: list[tuple[str, str, list[str], Mapping[Any, int | float]]] = [
            ("queue_depth", "Requests accepted and not running.", ["class"], gauges.queue_depth),
            ("oldest_age_seconds", "Age of the oldest of them.", ["class"], gauges.oldest_age_s),
            ("model_depth", "Requests accepted and not running, by model.", of_model, depth),
            ("model_oldest_age_seconds", "Age of the oldest of them.", of_model, gauges.model_oldest_age_s),
            ("model_paused", "1 while an order pauses the class or the model.", of_model, paused),
            ("model_queue_depth", "The same of all classes.", ["model", "pool"], _all_classes(depth)),
            ("device_memory_bytes", "Memory of all workers' devices.", ["device", "kind"], gauges.device_memory),
            ("batch_size", "Requests running, by model.", ["model", "pool"], gauges.running),
            ("dlq_letters", "Dead letters that lie on their topic, by reason.", ["reason"], read.read_letters()),
            ("held_records", "Records behind open transactions.", ["topic"], read.read_held_records()),
            ("problems", "Problems found.", ["problem", "subject", "pool"], read.read_problems()),
            ("batches", "Batches run here, by what they wait for.", ["waiting_for"], read.read_batches()),
        ]
        for name, text, labels, values in families:
            family = GaugeMetricFamily(f"penstock_{name}", text, labels=labels)
            for key, value in values.items():
                family.add_metric([key] if isinstance(key, str) else key, value)
            yield family
        yield GaugeMetricFamily("penstock_inflight", "Requests accepted and not done.", value=gauges.inflight)
        yield GaugeMetricFamily("penstock_streams", "Open exchanges that wait for an outcome.", value=gauges.streams)
        yield GaugeMetricFamily("penstock_ws_clients", "Open WebSockets.", value=gauges.ws_clients)
        due, swept = read.read_swept()
        yield GaugeMetricFamily("penstock_conversations_due", "Conversations to be deleted by age.", value=due)
        yield _counters("conversations_swept", "Conversations that were due, by what became of them.", "result", swept)
        yield _counters("view_records", "Records read for the view.", "fate", read.read_records())


def _all_classes(depths: Mapping[ModelQueue, int]) -> Mapping[tuple[str, str], int]:
    sums: defaultdict[tuple[str, str], int] = defaultdict(int)
    for (_, model, pool), depth in depths.items():
        sums[model, pool] += depth
    return sums


def _counters(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"penstock_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
