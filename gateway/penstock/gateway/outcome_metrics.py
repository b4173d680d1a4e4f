"""What outcomes add to the metrics of a gateway: by task, by model and by tenant."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from penstock.common.labels import BoundedLabel
from penstock.schemas.records import ResultEvent, Timings

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
