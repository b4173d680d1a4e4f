"""The Prometheus metrics of `penstock summarizer`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest

from penstock.gateway.summarizer.summary_scheduler import SummaryScheduler

disable_created_metrics()


class SummarizerMetrics:
    """One per process, with a registry of its own."""

    def __init__(self, scheduler: SummaryScheduler) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter(
            "penstock_summaries", "Requests for due summaries, by their outcome.", ["outcome"], registry=self.registry
        )
        followed = Gauge("penstock_conversations_followed", "Conversations that have a policy.", registry=self.registry)
        due = Gauge("penstock_summaries_due", "Summaries that are due and not asked for.", registry=self.registry)
        running = Gauge("penstock_summaries_in_flight", "Requests for summaries under way.", registry=self.registry)
        followed.set_function(lambda: len(scheduler.followed))
        due.set_function(lambda: scheduler.due)
        running.set_function(lambda: scheduler.running)

    def on_end(self, outcome: str) -> None:
        """Count a request that ended: as its status says, or refused, gone or lost."""
        self._ended.labels(outcome=outcome).inc()

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)
