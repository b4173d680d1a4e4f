"""Another priority holds at every worker that gets the request: also behind a kill, and at one that starts later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from penstock.producers import Client
from system import Process, System, eventually

MODEL: dict[str, Any] = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": 400, "delay_ms": 50, "slots": 1},
}
WAITING = 12


def submit(gateway: Process, *, tokens: int = 8, **fields: Any) -> str:
    payload = {"messages": [{"role": "user", "content": "go"}], "max_tokens": tokens}
    return gateway.submit(payload=payload, **fields)


def lift(gateway: Process, request_id: str, to: Any = "high") -> httpx.Response:
    return httpx.post(f"{gateway.url}/v1/requests/{request_id}/reprioritize", json={"priority": to}, timeout=20)


def order(system: System, ids: list[str]) -> list[str]:
    """The requests in the order in which they started."""
    ran = {e.request_id: e.created_at - (e.timings.run_ms if e.timings else 0) for e in system.outcomes().values()}
    return sorted(ids, key=lambda one: ran[one])


def test_a_lifted_request_is_next_after_its_worker_was_killed(make_system: Callable[..., System]) -> None:
    system = make_system(models=[MODEL])
    gateway = system.gateway().wait_ready()
    first = system.worker().wait_ready()
    runs = submit(gateway, priority=1, tokens=300)
    eventually(lambda: gateway.request(runs)["status"] == "running", 30, first.tail)
    low = [submit(gateway, priority=9) for _ in range(WAITING)]
    eventually(lambda: gateway.request(low[-1])["status"] == "queued", 30, first.tail)
    refused = lift(gateway, runs, 9)
    assert (refused.status_code, refused.json()["error"]["details"]) == (409, {"status": "running"})
    assert lift(gateway, low[-1]).status_code == 202
    first.kill9()
    assert gateway.request(low[-1])["done"] is False
    second = system.worker("w2").wait_ready()
    eventually(lambda: len(system.outcomes()) == WAITING + 1, 120, second.tail)
    assert {outcome.status for outcome in system.outcomes().values()} == {"completed"}
    ran = order(system, [runs, *low])
    assert ran.index(low[-1]) <= 3, "what came first on other partitions had the slot for a moment"
    assert gateway.request(low[-1])["priority"] == 2
    assert lift(gateway, low[-1]).json()["error"]["details"]["status"] == "completed"
    eventually(lambda: system.lag() == 0, 30, second.tail)


def test_what_was_moved_before_any_worker_ran_runs_in_that_order(make_system: Callable[..., System]) -> None:
    """By HTTP and, straight over Kafka, by a client."""
    system = make_system(models=[MODEL])
    gateway = system.gateway().wait_ready()
    medium = [submit(gateway, priority=5) for _ in range(6)]
    low = [submit(gateway, priority=9) for _ in range(4)]
    turns = [submit(gateway, priority=9, conversation_id="c") for _ in range(2)]
    moved = [low.pop(), low.pop(), *turns]
    assert lift(gateway, moved[0]).status_code == lift(gateway, turns[1]).status_code == 202
    with Client(system.kafka) as client:
        for one in (moved[1], turns[0]):
            client.reprioritize(one, 2)
    eventually(lambda: gateway.request(turns[0])["priority"] == 2, 20, gateway.tail)
    worker = system.worker().wait_ready()
    ids = [*medium, *low, *moved]
    eventually(lambda: len(system.outcomes()) == len(ids), 60, worker.tail)
    ran = order(system, ids)
    assert max(ran.index(one) for one in moved) <= 6, "what came first had the slot for a moment"
    assert ran.index(turns[0]) < ran.index(turns[1])
    assert max(ran.index(one) for one in medium) < min(ran.index(one) for one in low)
