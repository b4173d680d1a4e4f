"""Point 11: cancel queued, running and before any worker runs; a broker restarted under load loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from system import Process, System, eventually

SLOW = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": 400, "delay_ms": 50, "slots": 1},
}
QUICK = {**SLOW, "options": {"tokens": 5, "delay_ms": 20, "slots": 8}}


def cancel(gateway: Process, request_id: str) -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/requests/{request_id}/cancel", timeout=20)


def test_cancel_running_and_queued(make_system: Callable[..., System]) -> None:
    system = make_system(models=[SLOW])
    worker = system.worker()
    gateway = system.gateway().wait_ready()
    worker.wait_ready()
    running = gateway.submit(stream=True)
    eventually(lambda: gateway.request(running)["status"] == "running", 30, worker.tail)
    queued = gateway.submit(stream=True)
    for request_id in (queued, running):
        assert cancel(gateway, request_id).status_code == 202
        found = gateway.request(request_id, wait=30)
        assert found["status"] == "cancelled", found
        assert found["error"]["code"] == "cancelled"
    again = cancel(gateway, running)
    assert again.status_code == 200
    assert again.json()["status"] == "cancelled"
    assert system.outcomes()[queued].status == "cancelled"
    eventually(lambda: system.lag() == 0, 30, worker.tail)


def test_cancel_before_any_worker_runs(make_system: Callable[..., System]) -> None:
    system = make_system(models=[SLOW])
    gateway = system.gateway().wait_ready()
    request_id = gateway.submit(stream=True)
    assert cancel(gateway, request_id).status_code == 202
    worker = system.worker().wait_ready()
    assert gateway.request(request_id, wait=30)["status"] == "cancelled"
    assert not [e for e in system.results() if e.kind == "chunk"]
    eventually(lambda: system.lag() == 0, 30, worker.tail)


def test_the_broker_restarts_under_load(make_system: Callable[..., System], kafka: Any) -> None:
    system = make_system(models=[QUICK])
    worker, gateway = system.worker(), system.gateway()
    gateway.wait_ready()
    worker.wait_ready()
    ids = [gateway.submit(stream=True) for _ in range(150)]
    eventually(lambda: len(system.outcomes()) > 5, 60, worker.tail)
    kafka.restart()
    system.wait_drained(180)
    outcomes = system.outcomes()
    assert set(ids) == set(outcomes)
    assert {event.status for event in outcomes.values()} == {"completed"}
    for request_id in ids[-3:]:
        assert gateway.request(request_id, wait=30)["status"] == "completed"
    assert gateway.request(gateway.submit(stream=True), wait=60)["status"] == "completed"
    assert worker.alive()
    assert gateway.alive()
