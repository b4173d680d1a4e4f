"""The worker's Prometheus metrics, by the names of DESIGN §6, in a registry of their own."""

from __future__ import annotations

from functools import cache

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
        self.depth = Gauge("penstock_queue_depth", "Requests waiting in the scheduler", ["class"], registry=registry)
        self.oldest = Gauge(
            "penstock_oldest_age_seconds", "Age of the oldest waiting request", ["class"], registry=registry
        )
        self.inflight = Gauge("penstock_inflight", "Requests held and not finished", registry=registry)
        self.running = Gauge("penstock_running", "Requests on an engine", registry=registry)
        self.memory = Gauge("penstock_device_memory_bytes", "Memory by device", ["device", "kind"], registry=registry)
        self.parked = Gauge(
            "penstock_parked", "Waiting requests whose bytes are not here", ["class"], registry=registry
        )
        self.intake = Gauge("penstock_intake_bytes", "Memory of waiting requests, as counted", registry=registry)
        self.output_bytes = Gauge(
            "penstock_output_bytes",
            "Memory of finished outputs that the broker or the store of artifacts has not taken",
            registry=registry,
        )
        self.unkept = Gauge(
            "penstock_outputs_not_stored",
            "Finished requests whose output the store of artifacts did not take yet",
            registry=registry,
        )
        self.paused = Gauge("penstock_paused_partitions", "Partitions that deliver nothing now", registry=registry)
        self.beyond = Gauge(
            "penstock_beyond_span", "Records of paused partitions that this worker cannot see yet", registry=registry
        )
        self.requests = Counter("penstock_requests", "Requests by outcome", ["task", "outcome"], registry=registry)
        self.wait = Histogram(
            "penstock_wait_seconds",
            "From arrival to the start of the run",
            ["class", "task", "model"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.run = Histogram(
            "penstock_run_seconds", "Length of a run", ["task", "model"], registry=registry, buckets=_SECONDS
        )
        self.model_depth = Gauge(
            "penstock_model_queue_depth", "Requests waiting, by model", ["model", "pool"], registry=registry
        )
        self.first_token = Histogram(
            "penstock_first_token_seconds", "From arrival to the first token", registry=registry, buckets=_SECONDS
        )
        self.tokens = Counter("penstock_tokens", "Tokens by kind", ["kind"], registry=registry)
        self.pixels = Counter("penstock_pixels", "Pixels of images made", registry=registry)
        self.batch = Gauge("penstock_batch_size", "Requests running on one engine", ["model"], registry=registry)
        self.loads = Counter("penstock_model_loads", "Models loaded", ["model"], registry=registry)
        self.unloads = Counter(
            "penstock_model_unloads", "Models unloaded or died, by reason", ["model", "reason"], registry=registry
        )
        self.out_of_memory = Counter(
            "penstock_engine_out_of_memory", "Batches and loads that memory ran out in", ["model"], registry=registry
        )
        self.memory_errors = Histogram(
            "penstock_memory_estimate_ratio",
            "The most memory that an engine held, divided by what was booked as it was loaded",
            registry=registry,
            buckets=_RATIOS,
        )
        self.load_seconds = Histogram(
            "penstock_model_load_seconds", "Length of a load", ["model"], registry=registry, buckets=_SECONDS
        )
        self.evictions = Counter(
            "penstock_model_evictions", "Models unloaded for others", ["model", "reason"], registry=registry
        )
        self.waiting = Gauge("penstock_waiting", "Requests near the front, by reason", ["reason"], registry=registry)
        self.utilisation = Gauge(
            "penstock_engine_utilisation", "Slots and tokens in use of late, 0 to 1", ["model"], registry=registry
        )
        self.errors = Histogram(
            "penstock_estimate_error_seconds",
            "What came, less what was estimated: of the start of a request, of the length of a run",
            ["kind"],
            registry=registry,
            buckets=_ERRORS,
        )
        self._errors = {kind: self.errors.labels(kind) for kind in ("start", "run")}
        self.dead_letters = Counter("penstock_dlq", "Dead letters by reason", ["reason"], registry=registry)
        self.retries = Counter("penstock_retries", "Attempts after the first", registry=registry)
        self.rebalances = Gauge("penstock_rebalances", "Assignments seen by this worker", registry=registry)
        self.offset_resets = Counter(
            "penstock_offset_resets",
            "Partitions that went on at another offset because their log did not hold the position, by reason",
            ["reason"],
            registry=registry,
        )
        # Gateways count them; a worker has no sockets either. The names are there so that each is known on every port.
        Gauge("penstock_dlq_letters", "Dead letters on their topic: counted by gateways", ["reason"], registry=registry)
        Gauge("penstock_ws_clients", "Open WebSockets: none on a worker", registry=registry)
        # Children are kept: looking one up by its labels costs more than counting.
        self.prompt_tokens = self.tokens.labels("prompt")
        self.completion_tokens = self.tokens.labels("completion")
        self._outcomes: dict[tuple[str, str], Counter] = {}
        self._wait_of, self._run_of = cache(self.wait.labels), cache(self.run.labels)
        self.model_label = BoundedLabel()
        self.completed_total = 0
        self.failed_total = 0

    def outcome(self, task: str, outcome: str, klass: str, model: str, *, waited_s: float, ran_s: float | None) -> None:
        """Count one finished request; seconds from its arrival to its run, and of its run."""
        child = self._outcomes.get((task, outcome))
        if child is None:
            child = self._outcomes[(task, outcome)] = self.requests.labels(task, outcome)
        child.inc()
        model = self.model_label.of(model)
        self._wait_of(klass, task, model).observe(waited_s)
        if ran_s is not None:
            self._run_of(task, model).observe(ran_s)
        if outcome == "completed":
            self.completed_total += 1
        else:
            self.failed_total += 1

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
