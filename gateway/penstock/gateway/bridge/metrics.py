"""The bridge's Prometheus metrics: what became of the messages of queues, and what waits here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

# Gauges of the times at which counters began: nobody reads them, and they double the series.
disable_created_metrics()


class BridgeMetrics:
    """One per bridge, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._messages = Counter(
            "penstock_queue_messages",
            "Messages of [[queues]] by what became of them here.",
            ["topic", "outcome"],
            registry=self.registry,
        )
        self._waiting = Gauge(
            "penstock_queue_waiting", "Messages of [[queues]] read and not begun.", ["topic"], registry=self.registry
        )

    def on_message(self, topic: str, outcome: str) -> None:
        """Count what became of a message of a queue: completed, refused, dead_lettered, ignored or tried_again."""
        self._messages.labels(topic=topic, outcome=outcome).inc()

    def on_waiting(self, topic: str, count: int) -> None:
        """So many messages of a queue were read here and wait for room in its window."""
        self._waiting.labels(topic=topic).set(count)

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)
