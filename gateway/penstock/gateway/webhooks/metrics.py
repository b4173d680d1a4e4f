"""The Prometheus metrics of `penstock webhooks`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()


class WebhookMetrics:
    """One per process, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._attempts = Counter(
            "penstock_webhook_attempts", "Calls of receivers, by their answer.", ["answer"], registry=self.registry
        )
        self._ended = Counter(
            "penstock_webhooks", "Webhooks by what became of them.", ["state"], registry=self.registry
        )
        self._statuses = Counter(
            "penstock_webhook_statuses",
            "Statuses that receivers were to hear of, by what became of them.",
            ["state"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "penstock_webhook_seconds", "How long a receiver took to answer.", registry=self.registry
        )
        self._waiting = Gauge("penstock_webhooks_waiting", "Webhooks held here, not ended.", registry=self.registry)
        self._in_flight = Gauge("penstock_webhooks_in_flight", "Calls that are open now.", registry=self.registry)
        self._oldest = Gauge(
            "penstock_webhooks_oldest_seconds", "Age of the oldest webhook that waits here.", registry=self.registry
        )

    def on_attempt(self, status_code: int | None, seconds: float) -> None:
        """Count a call: 2xx, 3xx, 4xx, 5xx or none."""
        self._attempts.labels(answer="none" if status_code is None else f"{status_code // 100}xx").inc()
        self._seconds.observe(seconds)

    def on_end(self, state: str) -> None:
        """Count a webhook that is delivered, failed or dropped."""
        self._ended.labels(state=state).inc()

    def on_status(self, state: str) -> None:
        """Count a status that is delivered, has failed or was dropped: the next one came, or there was no room."""
        self._statuses.labels(state=state).inc()

    def watch(
        self, waiting: Callable[[], float], in_flight: Callable[[], float], oldest_s: Callable[[], float]
    ) -> None:
        """Where the gauges come from."""
        self._waiting.set_function(waiting)
        self._in_flight.set_function(in_flight)
        self._oldest.set_function(oldest_s)
