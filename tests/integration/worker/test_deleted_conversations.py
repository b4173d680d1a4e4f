"""Deleting a conversation while turns run and wait: they end as cancelled, nothing of them is written again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.common import admin
from penstock.schemas.records import ResultEvent
from system import Process, System, eventually
from worker_requests import engine, outcome, records, send, statuses, turn

pytestmark = pytest.mark.slow

SLOW_MS = 600_000
"""So long a run takes: it ends in a test only by a cancel."""


def start_gateway(system: System) -> Process:
    return system.gateway().wait_ready()


def submit(gateway: Process, text: str, conversation: str = "c1") -> str:
    return gateway.submit(conversation_id=conversation, payload={"messages": [{"role": "user", "content": text}]})


def delete(gateway: Process, conversation: str = "c1") -> dict[str, Any]:
    answer = httpx.delete(f"{gateway.url}/v1/conversations/{conversation}", timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def listed(gateway: Process) -> list[str]:
    return [one["id"] for one in httpx.get(f"{gateway.url}/v1/conversations", timeout=30).json()["data"]]


def topic_id(system: System, conversation: str = "c1") -> str | None:
    return admin.topic_id(system.kafka, system.names.conversation("default", conversation))


def wait_running(system: System, request_id: str) -> None:
    eventually(lambda: "running" in statuses(system, request_id), 60, lambda: f"{request_id} does not run")


def ended_by_the_delete(event: ResultEvent) -> bool:
    assert event.error is not None, event
    return (event.status, event.error.code, event.error.message) == (
        "cancelled",
        "cancelled",
        "its conversation was deleted",
    )


def written(system: System) -> list[tuple[str | None, str]]:
    return [(message.request_id, message.direction) for _, message in records(system)]


def test_all_turns_before_the_delete_end_and_the_next_starts_empty(make_system: Callable[..., System]) -> None:
    system = make_system(models=[engine(echo=True, first_delay_ms=SLOW_MS), {**engine(echo=True), "id": "quick"}])
    worker, gateway = system.worker().wait_ready(), start_gateway(system)
    running = submit(gateway, "one")
    wait_running(system, running)
    waiting = submit(gateway, "two")
    # One comes straight over Kafka, in another class.
    send(system, turn("straight", "three", priority=9))
    eventually(lambda: bool(statuses(system, "straight")), 60, worker.tail)
    before = topic_id(system)

    assert delete(gateway) == {"object": "conversation.deleted", "id": "c1", "deleted": True}
    assert listed(gateway) == []
    assert topic_id(system) is None
    for request_id in (running, waiting, "straight"):
        assert ended_by_the_delete(outcome(system, request_id))
    told = httpx.get(f"{gateway.url}/v1/requests/{waiting}", timeout=30).json()
    assert (told["status"], told["done"]) == ("cancelled", True)
    assert httpx.delete(f"{gateway.url}/v1/conversations/c1", timeout=30).status_code == 404
    assert (listed(gateway), topic_id(system)) == ([], None)

    send(system, {**turn("next", "four"), "model": "quick"})
    event = outcome(system, "next")
    assert event.status == "completed", event.error
    assert "four" in event.output["text"]
    assert not any(old in event.output["text"] for old in ("one", "two", "three"))
    assert written(system) == [
        ("next", "in"),
        ("next", "out"),
    ]
    assert topic_id(system) not in (None, before)
    assert listed(gateway) == ["c1"]
    assert worker.stop() == 0, worker.tail()


def test_a_delete_while_the_worker_is_dead_is_known_to_the_next(make_system: Callable[..., System]) -> None:
    system = make_system(
        models=[engine(echo=True, first_delay_ms=SLOW_MS), {**engine(echo=True), "id": "quick"}],
        worker_options={"session_timeout_s": 6},
    )
    worker, gateway = system.worker().wait_ready(), start_gateway(system)
    running = submit(gateway, "one")
    wait_running(system, running)
    waiting = submit(gateway, "two")
    eventually(lambda: bool(statuses(system, waiting)), 60, worker.tail)
    worker.kill9()

    delete(gateway)
    # Another turn makes the conversation anew before any worker has read of the first two.
    send(system, {**turn("next", "three"), "model": "quick"})
    second = system.worker("w2").wait_ready()
    assert second.popen.pid != worker.popen.pid
    for request_id in (running, waiting):
        assert ended_by_the_delete(outcome(system, request_id, 60))
    event = outcome(system, "next", 60)
    assert event.status == "completed", event.error
    assert not any(old in str(event.output) for old in ("one", "two"))
    assert written(system) == [
        ("next", "in"),
        ("next", "out"),
    ]
    system.wait_drained()
    assert second.stop() == 0, second.tail()


def test_an_erased_turn_that_is_delivered_again_writes_nothing(make_system: Callable[..., System]) -> None:
    """Its worker is killed before the commit, and the turn is erased while no worker lives."""
    system = make_system(models=[engine(echo=True)], worker_options={"commit_interval_s": 600})
    worker, gateway = system.worker("w1").wait_ready(), start_gateway(system)
    kept, erased = submit(gateway, "one"), submit(gateway, "secret")
    assert [outcome(system, one).status for one in (kept, erased)] == ["completed", "completed"]
    assert {request_id for request_id, _ in written(system)} == {kept, erased}
    worker.kill9()
    eventually(lambda: httpx.get(f"{gateway.url}/v1/requests/{erased}?wait=5").json()["done"], 30, gateway.tail)
    assert httpx.delete(f"{gateway.url}/v1/requests/{erased}", timeout=30).status_code == 200

    second = system.worker("w2").wait_ready()

    def ends() -> list[str | None]:
        return [event.status for event in system.results() if (event.request_id, event.kind) == (erased, "terminal")]

    def standing() -> int:
        topic = system.names.conversation("default", "c1")
        return sum(value is not None for value in {m.key(): m.value() for m in system.read(topic)}.values())

    eventually(lambda: ends() == ["completed", "cancelled"], 60, second.tail)
    eventually(lambda: standing() == 2, 30, second.tail)
    assert len(written(system)) == 4, "two turns, each with its answer, written once"
