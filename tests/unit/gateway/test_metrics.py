"""Metrics: the names of the design, counted from outcomes and read from the gateway's state."""

from __future__ import annotations

from penstock.gateway.metrics import GatewayMetrics, Gauges
from penstock.schemas.records import Origin, ResultEvent, StatusEvent, Timings, Usage

ORIGIN = Origin(topic="t", partition=0, offset=0, append_time_ms=0)


def outcome(status: str, **values: object) -> ResultEvent:
    return ResultEvent(
        request_id="r",
        tenant="default",
        kind="terminal",
        origin=ORIGIN,
        attempt=1,
        epoch=1,
        task="text_generation",
        created_at=0,
        worker_id="w",
        status=status,
        **values,  # type: ignore[arg-type]
    )


def status_event(status: str) -> StatusEvent:
    return StatusEvent(
        request_id="r",
        tenant="default",
        status=status,
        done=False,
        rank=50,
        attempt=2,
        epoch=1,
        origin=ORIGIN,
        worker_id="w",
        created_at=0,
    )


def test_outcomes_are_counted() -> None:
    metrics = GatewayMetrics()
    usage = Usage(prompt_tokens=7, completion_tokens=5, total_tokens=12)
    timings = Timings(queued_ms=100, admission_ms=20, load_ms=30, run_ms=2000, first_token_ms=40)
    metrics.on_outcome(outcome("completed", usage=usage, timings=timings, model="chat"), "high")
    metrics.on_outcome(outcome("dead_lettered"), "low")
    metrics.on_status(status_event("retrying"))
    metrics.on_status(status_event("running"))
    text = metrics.render().decode()
    for line in (
        'penstock_requests_total{outcome="completed",task="text_generation"} 1.0',
        'penstock_requests_total{outcome="dead_lettered",task="text_generation"} 1.0',
        'penstock_tokens_total{kind="prompt"} 7.0',
        'penstock_tokens_total{kind="completion"} 5.0',
        "penstock_retries_total 1.0",
        "penstock_dlq_total 1.0",
        'penstock_wait_seconds_sum{class="high",model="chat",task="text_generation"} 0.15',
        'penstock_run_seconds_sum{model="chat",task="text_generation"} 2.0',
        "penstock_first_token_seconds_sum 0.04",
    ):
        assert line in text.splitlines(), line


def test_batches_and_their_lines() -> None:
    metrics = GatewayMetrics()
    metrics.read_batches = lambda: {"": 2, "paused": 1}
    metrics.on_batch_line(completed=True)
    text = metrics.render().decode().splitlines()
    for line in (
        'penstock_batches{waiting_for=""} 2.0',
        'penstock_batches{waiting_for="paused"} 1.0',
        'penstock_batch_lines_total{result="completed"} 1.0',
        'penstock_batch_lines_total{result="failed"} 0.0',
    ):
        assert line in text, line


def test_records_of_the_view_are_read_when_scraped() -> None:
    metrics = GatewayMetrics()
    assert b"penstock_view_records_total{" not in metrics.render(), "there is no view yet"
    metrics.read_records = lambda: {"decoded": 2, "passed_over": 40}
    assert b'penstock_view_records_total{fate="passed_over"} 40.0' in metrics.render()


def test_gauges_are_read_when_scraped() -> None:
    state = [Gauges()]
    metrics = GatewayMetrics(lambda: state[0])
    assert "penstock_inflight 0.0" in metrics.render().decode()
    state[0] = Gauges(queue_depth={"low": 4}, oldest_age_s={"low": 2.5}, inflight=6, ws_clients=2)
    lines = metrics.render().decode().splitlines()
    assert 'penstock_queue_depth{class="low"} 4.0' in lines
    assert 'penstock_oldest_age_seconds{class="low"} 2.5' in lines
    assert "penstock_inflight 6.0" in lines
    assert "penstock_ws_clients 2.0" in lines
