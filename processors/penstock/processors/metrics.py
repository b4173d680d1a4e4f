"""The worker's Prometheus metrics, by the names of DESIGN §6, in a registry of their own."""

from __future__ import annotations

from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from penstock.common.labels import BoundedLabel

# Gauges of the times at which counters began: nobody reads them, and they double the series.
disable_created_metrics()

_ERRORS = (-300, -60, -30, -10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)
_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.87, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)


class Metrics:
    """One per process. The gauges are set from `stats()` snapshots when scraped, the rest as things happen."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=_SECONDS)
        self.depth = gauge("penstock_queue_depth", "Requests waiting in the scheduler", ["class"])
        self.oldest = gauge("penstock_oldest_age_seconds", "Age of the oldest waiting request", ["class"])
        self.inflight = gauge("penstock_inflight", "Requests held and not finished")
        self.running = gauge("penstock_running", "Requests on an engine")
        self.memory = gauge("penstock_device_memory_bytes", "Memory by device", ["device", "kind"])
        self.parked = gauge("penstock_parked", "Waiting requests whose bytes are not here", ["class"])
        self.intake = gauge("penstock_intake_bytes", "Memory of waiting requests, as counted")
        self.output_bytes = gauge(
            "penstock_output_bytes",
            "Memory of chunks and finished outputs that the broker or the store of artifacts has not taken",
        )
        self.unacknowledged = gauge("penstock_unacknowledged_records", "Records that Kafka has not acknowledged")
        self.unacknowledged_s = gauge(
            "penstock_unacknowledged_age_seconds", "Age of the oldest record that Kafka has not acknowledged"
        )
        self.awaiting_store = gauge(
            "penstock_outputs_not_stored",
            "Finished requests whose output the store of artifacts did not take yet",
        )
        self.paused = gauge("penstock_paused_partitions", "Partitions that deliver nothing now")
        self.beyond = gauge("penstock_beyond_span", "Records of paused partitions that this worker cannot see yet")
        self.requests = counter("penstock_requests", "Requests by outcome", ["task", "outcome"])
        self.wait = histogram(
            "penstock_wait_seconds", "From arrival to the start of the run", ["class", "task", "model"]
        )
        self.run = histogram("penstock_run_seconds", "Length of a run", ["task", "model"])
        self.model_depth = gauge("penstock_model_queue_depth", "Requests waiting, by model", ["model", "pool"])
        self.first_token = histogram("penstock_first_token_seconds", "From arrival to the first token", ["model"])
        self.tokens = counter("penstock_tokens", "Tokens by kind", ["kind"])
        self.pixels = counter("penstock_pixels", "Pixels of images made")
        self.batch = gauge("penstock_batch_size", "Requests running on one engine", ["model", "pool"])
        self.loads = counter("penstock_model_loads", "Models loaded", ["model"])
        self.unloads = counter("penstock_model_unloads", "Models unloaded or died, by reason", ["model", "reason"])
        self.out_of_memory = counter(
            "penstock_engine_out_of_memory", "Batches and loads that memory ran out in", ["model"]
        )
        self.memory_errors = histogram(
            "penstock_memory_estimate_ratio",
            "The most memory that an engine held, divided by what was booked as it was loaded",
            buckets=_RATIOS,
        )
        self.load_seconds = histogram("penstock_model_load_seconds", "Length of a load", ["model"])
        self.evictions = counter("penstock_model_evictions", "Models unloaded for others", ["model", "reason"])
        self.waiting = gauge("penstock_waiting", "Requests near the front, by reason", ["reason"])
        self.utilisation = gauge("penstock_engine_utilisation", "Slots and tokens in use recently, 0 to 1", ["model"])
        self.errors = histogram(
            "penstock_estimate_error_seconds",
            "What came, less what was estimated: of the start of a request, of the length of a run",
            ["kind"],
            buckets=_ERRORS,
        )
        self._errors = {kind: self.errors.labels(kind) for kind in ("start", "run")}
        self.dead_letters = counter("penstock_dlq", "Dead letters by reason", ["reason"])
        self.retries = counter("penstock_retries", "Attempts after the first")
        self.rebalances = gauge("penstock_rebalances", "Assignments seen by this worker")
        self.offset_resets = counter(
            "penstock_offset_resets",
            "Partitions that went on at another offset because their log did not hold the position, by reason",
            ["reason"],
        )
        for reason in ("log_truncated", "records_deleted"):
            self.offset_resets.labels(reason)  # at 0, so that Prometheus sees the first one as an increase
        # Gateways count them; a worker has no sockets either. The names are there so that each is known on every port.
        gauge("penstock_dlq_letters", "Dead letters on their topic: counted by gateways", ["reason"])
        gauge("penstock_ws_clients", "Open WebSockets: none on a worker")
        # Children are kept: looking one up by its labels costs more than counting.
        self.prompt_tokens = self.tokens.labels("prompt")
        self.completion_tokens = self.tokens.labels("completion")
        self._outcome_of = cache(self.requests.labels)
        self._wait_of, self._run_of = cache(self.wait.labels), cache(self.run.labels)
        self._first_token_of = cache(self.first_token.labels)
        self.model_label = BoundedLabel()
        self.completed_total = 0
        self.failed_total = 0

    def outcome(self, task: str, outcome: str, klass: str, model: str, *, waited_s: float, ran_s: float | None) -> None:
        """Count one finished request; seconds from its arrival to its run, and of its run."""
        self._outcome_of(task, outcome).inc()
        model = self.model_label.of(model)
        self._wait_of(klass, task, model).observe(waited_s)
        if ran_s is not None:
            self._run_of(task, model).observe(ran_s)
        if outcome == "completed":
            self.completed_total += 1
        else:
            self.failed_total += 1

    def first_token_after(self, seconds: float, model: str | None) -> None:
        """The first token of a request has come so long after its arrival."""
        self._first_token_of(self.model_label.of(model)).observe(seconds)

    def estimate_error(self, kind: str, seconds: float) -> None:
        """What came, less what was estimated; `kind` is start or run."""
        self._errors[kind].observe(seconds)

    def memory_error(self, peak_bytes: int, booked_bytes: int) -> None:
        """An engine has ended: the most that it held, and what was booked for it."""
        if booked_bytes:
            self.memory_errors.observe(peak_bytes / booked_bytes)

    def offset_reset(self, reason: str) -> None:
        """A partition goes on at another offset; `reason` is log_truncated or records_deleted. From any thread."""
        self.offset_resets.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)
