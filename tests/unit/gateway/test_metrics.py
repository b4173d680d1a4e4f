"""Metrics: the documented names, counted from outcomes and read from the gateway's state."""

from __future__ import annotations

from kit.gateway_records import outcome, status
from penstock.gateway.metrics import GatewayMetrics, Gauges
from penstock.schemas.records import Timings, Usage


def lines_of(metrics: GatewayMetrics) -> list[str]:
    return metrics.render().decode().splitlines()


def test_outcomes_are_counted() -> None:
    metrics = GatewayMetrics()
    usage = Usage(prompt_tokens=7, completion_tokens=5, total_tokens=12)
    timings = Timings(queued_ms=100, admission_ms=20, load_ms=30, run_ms=2000, first_token_ms=40)
    metrics.on_outcome(outcome(usage=usage, timings=timings, model="chat"), "high")
    metrics.on_outcome(outcome(status="dead_lettered"), "low")
    metrics.on_status(status("retrying"))
    metrics.on_status(status("running"))
    assert {
        'penstock_requests_total{outcome="completed",task="text_generation"} 1.0',
        'penstock_requests_total{outcome="dead_lettered",task="text_generation"} 1.0',
        'penstock_tokens_total{kind="prompt"} 7.0',
        'penstock_tokens_total{kind="completion"} 5.0',
        "penstock_retries_total 1.0",
        "penstock_dlq_total 1.0",
        'penstock_wait_seconds_sum{class="high",model="chat",task="text_generation"} 0.15',
        'penstock_run_seconds_sum{model="chat",task="text_generation"} 2.0',
        "penstock_first_token_seconds_sum 0.04",
    } <= {*lines_of(metrics)}


def test_batches_and_their_lines() -> None:
    metrics = GatewayMetrics()
    metrics.read_batches = lambda: {"": 2, "paused": 1}
    metrics.on_batch_line(completed=True)
    assert {
        'penstock_batches{waiting_for=""} 2.0',
        'penstock_batches{waiting_for="paused"} 1.0',
        'penstock_batch_lines_total{result="completed"} 1.0',
        'penstock_batch_lines_total{result="failed"} 0.0',
    } <= {*lines_of(metrics)}


def test_gauges_and_records_of_the_view_are_read_when_scraped() -> None:
    state = [Gauges()]
    metrics = GatewayMetrics(lambda: state[0])
    assert "penstock_inflight 0.0" in lines_of(metrics)
    assert b"penstock_view_records_total{" not in metrics.render(), "there is no view yet"
    metrics.read_records = lambda: {"decoded": 2, "passed_over": 40}
    state[0] = Gauges(queue_depth={"low": 4}, oldest_age_s={"low": 2.5}, inflight=6, ws_clients=2)
    assert {
        'penstock_view_records_total{fate="passed_over"} 40.0',
        'penstock_queue_depth{class="low"} 4.0',
        'penstock_oldest_age_seconds{class="low"} 2.5',
        "penstock_inflight 6.0",
        "penstock_ws_clients 2.0",
    } <= {*lines_of(metrics)}
