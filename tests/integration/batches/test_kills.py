"""Batches go on after a kill -9 of any part, and no line runs twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kit.batches import Batches, line
from support import wait_until
from system import NOOP, Process, System

Make = Callable[..., System]
SLOW = {**NOOP, "options": {"tokens": 4, "delay_ms": 10, "slots": 8}}
LINES, IN_FLIGHT = 600, 50


def begun(make_system: Make, gateways: int = 1, **options: Any) -> tuple[System, list[Process], str]:
    """(a system, its worker and gateways, a batch at the first of them with some lines done and the most to come)."""
    system = make_system(models=[SLOW], gateway_options={"batch_lines": IN_FLIGHT}, **options)
    processes = [system.worker(), *(system.gateway(f"g{n}") for n in range(gateways))]
    for process in processes:
        process.wait_ready()
    batches = Batches.at(processes[1])
    batch_id = batches.begin([line(n) for n in range(LINES)])
    batches.wait_count(batch_id, 50)
    assert batches.get(batch_id).status == "in_progress"
    return system, processes, batch_id


def check_ended(system: System, gateway: Process, batch_id: str, *, again: int = 0) -> None:
    """All lines are answered once. By the log no more than `again` requests ran twice."""
    batches = Batches.at(gateway)
    ended = batches.wait(batch_id, 150)
    assert (ended.status, ended.request_counts.completed) == ("completed", LINES), ended
    ids = sorted(one["custom_id"] for one in batches.lines(ended.output_file_id))
    assert ids == sorted(f"line-{n}" for n in range(LINES))
    sent = Counter(message.key() for message in system.read(system.names.request("text_generation", 8)))
    assert (len(sent), set(sent.values())) == (LINES, {1}), "each line was submitted once"
    assert sum(count - 1 for count in outcomes(system).values()) <= again


def outcomes(system: System) -> Counter[str]:
    """By request, how many outcomes the log has."""
    return Counter(event.request_id for event in system.results() if event.kind == "terminal")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("g0", id="and keeps its view", marks=pytest.mark.thorough),
        pytest.param("another", id="with its view"),
    ],
)
def test_the_gateway_is_killed(make_system: Make, name: str) -> None:
    """A new view is built from the topics: what ran is found there."""
    system, (_, gateway), batch_id = begun(make_system)
    gateway.kill9()
    again = system.gateway(name, port=gateway.port).wait_ready()
    check_ended(system, again, batch_id)


def test_another_gateway_takes_over(make_system: Make) -> None:
    system, (_, gateway, other), batch_id = begun(make_system, 2)
    assert Batches.at(other).get(batch_id).status == "in_progress", "every gateway answers for every batch"
    gateway.kill9()
    check_ended(system, other, batch_id)


def test_a_gateway_that_stops_hands_its_batch_over_at_once(make_system: Make) -> None:
    system, (_, gateway, other), batch_id = begun(make_system, 2)
    assert gateway.stop() == 0
    wait_until(lambda: "batch.taken" in other.tail(), 8, other.tail, promised=True)
    check_ended(system, other, batch_id)


def test_the_worker_is_killed(make_system: Make) -> None:
    system, (worker, gateway), batch_id = begun(make_system, worker_options={"session_timeout_s": 6, "heartbeat_s": 1})
    worker.kill9()
    ended = len(outcomes(system))
    system.worker("w2").wait_ready()
    # What ended since the last commit runs again: how much that is, is a matter of the machine. The rest does not.
    check_ended(system, gateway, batch_id, again=ended - 1)


@pytest.mark.thorough
def test_the_broker_is_killed(make_system: Make, kafka: Any) -> None:
    system, (_, gateway), batch_id = begun(make_system)
    kafka.kill()
    kafka.start()
    check_ended(system, gateway, batch_id, again=LINES)


def test_both_are_killed_and_cancelled_meanwhile(make_system: Make) -> None:
    system, (worker, gateway, other), batch_id = begun(make_system, 2)
    gateway.kill9()
    worker.kill9()
    assert Batches.at(other).client.batches.cancel(batch_id).status == "cancelling"
    system.worker("w2").wait_ready()
    batches = Batches.at(other)
    ended = batches.wait(batch_id, 150)
    assert ended.status == "cancelled"
    lines = [*batches.lines(ended.output_file_id), *batches.lines(ended.error_file_id)]
    assert sorted(one["custom_id"] for one in lines) == sorted(f"line-{n}" for n in range(LINES))
    assert ended.request_counts.completed >= 50
