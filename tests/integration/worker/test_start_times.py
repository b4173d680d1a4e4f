"""`start_after` end to end: a real broker, workers that are killed, a gateway that starts anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from penstock.producers import Client
from system import Process, System, eventually
from worker_requests import engine, outcome, send

MODEL = engine(tokens=2)
DAY_S = 86_400
TURN: dict[str, Any] = {"conversation_id": "c", "payload": {"messages": [{"role": "user", "content": "x"}]}}


def rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()


def depth(gateway: Process) -> float:
    return gateway.metric("penstock_queue_depth")


def started_ms(system: System, request_id: str) -> int:
    event = outcome(system, request_id)
    assert event.status == "completed"
    return event.created_at - (0 if event.timings is None else event.timings.run_ms)


def test_it_waits_for_its_time_over_kills_of_worker_and_gateway(make_system: Callable[..., System]) -> None:
    system = make_system(models=[MODEL])
    gateway, worker = system.gateway().wait_ready(), system.worker().wait_ready()
    start_s = time.time() + 12
    ids = [gateway.submit(start_after=rfc3339(start_s)), gateway.submit(start_after=start_s, **TURN)]
    send(system, {"request_id": "json", "start_after": int(start_s)})
    send(system, {"request_id": "header"}, headers={"penstock-not-before": str(round(start_s * 1000))})
    with Client(system.kafka) as client:
        client.submit(task="text_generation", payload={"prompt": "x"}, request_id="avro", start_after=rfc3339(start_s))
    ids += ["json", "header", "avro"]
    for one in ids:
        eventually(
            lambda one=one: (gateway.request(one).get("waiting_for") or {}).get("reason") == "scheduled",
            10,
            worker.tail,
        )
        seen = gateway.request(one)
        assert (seen["status"] in ("accepted", "queued"), seen["done"]) == (True, False)
        at = datetime.fromisoformat(seen["waiting_for"]["estimated_start_at"]).timestamp()
        assert at == pytest.approx(start_s, abs=1.1)
        assert datetime.fromisoformat(seen["start_after"]).timestamp() == pytest.approx(start_s, abs=1.1)
    assert depth(gateway) == 0, "what is to start later is no work that waits"
    other = gateway.submit(**TURN)
    assert started_ms(system, other) < start_s * 1000, "its conversation does not wait"
    worker.kill9()
    gateway.kill9()
    gateway = system.gateway("g2").wait_ready()
    worker = system.worker("w2").wait_ready()
    assert time.time() < start_s, "the machine is too slow for this test"
    assert depth(gateway) == 0
    for one in ids:
        assert started_ms(system, one) >= int(start_s) * 1000
    assert len(system.outcomes()) == len(ids) + 1
    eventually(lambda: system.lag() == 0, 30, worker.tail)


def test_it_is_cancelled_and_expires_as_others(make_system: Callable[..., System]) -> None:
    system = make_system(models=[MODEL])
    gateway, worker = system.gateway().wait_ready(), system.worker().wait_ready()
    later = time.time() + 3_600
    cancelled, expires = gateway.submit(start_after=later), gateway.submit(start_after=later, ttl_ms=1_500)
    assert httpx.post(f"{gateway.url}/v1/requests/{cancelled}/cancel", timeout=20).status_code == 202
    assert gateway.request(cancelled, wait=20)["status"] == "cancelled"
    assert gateway.request(expires, wait=20)["status"] == "expired"
    before = gateway.submit(start_after=time.time() - 60)
    assert gateway.request(before, wait=20)["status"] == "completed"
    eventually(lambda: system.lag() == 0, 30, worker.tail)

    def refused(**fields: Any) -> tuple[int, str, str]:
        body = {"task": "text_generation", "payload": {"prompt": "x"}, **fields}
        answer = httpx.post(f"{gateway.url}/v1/requests", json=body, timeout=20)
        error = answer.json()["error"]
        return answer.status_code, error["code"], error["param"]

    for value in ("tomorrow", True, [1], {"at": 1}, -5, time.time() + DAY_S + 60, rfc3339(time.time() + 2 * DAY_S)):
        assert refused(start_after=value) == (400, "invalid", "start_after"), value
    send(system, {"request_id": "far", "start_after": int(time.time()) + 2 * DAY_S})
    far = outcome(system, "far")
    assert (far.status, far.error.code, "start_after" in far.error.message) == ("dead_lettered", "invalid", True)


def test_the_stock_client_names_it_and_a_plan_says_so(make_system: Callable[..., System]) -> None:
    system = make_system(models=[MODEL])
    gateway = system.gateway().wait_ready()
    system.worker().wait_ready()
    start_s = time.time() + 3
    body: dict[str, Any] = {"model": "noop", "messages": [{"role": "user", "content": "hi"}]}
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions", json={**body, "penstock": {"start_after": start_s}}, timeout=60
    )
    assert answer.status_code == 200
    assert time.time() >= start_s
    plan = httpx.post(
        f"{gateway.url}/v1/requests",
        params={"dry_run": "true"},
        json={"task": "text_generation", "payload": {"prompt": "x"}, "start_after": time.time() + 600},
        timeout=20,
    ).json()
    assert plan["waiting_for"]["reason"] == "scheduled"
    assert 590_000 < plan["estimated_wait_ms"] <= 600_000
