"""Point 5: kill -9 of a worker at any moment: each accepted request has one outcome, offsets never run ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.producers import Client
from system import System, eventually

COUNT = 200
SLOW = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": 5, "delay_ms": 20, "slots": 16},
}


def submit_all(system: System, count: int = COUNT) -> set[str]:
    with Client(system.kafka) as client:
        return {
            client.submit(
                task="text_generation", payload={"prompt": f"request {n}"}, stream=True, priority=(1, 5, 9)[n % 3]
            ).request_id
            for n in range(count)
        }


def unfinished_passed(system: System) -> list[str]:
    """Requests below a committed offset for which no outcome is on the result topic: must always be none."""
    committed = system.committed()  # read first: what is committed now must have its outcome in the log already
    done = {
        (event.origin.topic, event.origin.partition, event.origin.offset)
        for event in system.results()
        if event.is_terminal
    }
    return [
        f"{topic}[{partition}]@{offset}"
        for (topic, partition), end in committed.items()
        for offset in range(end)
        if (topic, partition, offset) not in done
    ]


def finish_and_check(system: System, ids: set[str]) -> None:
    system.wait_drained(120)
    outcomes = system.outcomes()
    assert set(outcomes) == ids
    assert {event.status for event in outcomes.values()} == {"completed"}
    assert unfinished_passed(system) == []


def test_killed_while_queued(make_system: Callable[..., System]) -> None:
    system = make_system(models=[{**SLOW, "options": {"tokens": 5, "delay_ms": 30, "slots": 4}}])
    ids = submit_all(system)
    worker = system.worker("w1").wait_ready()
    eventually(lambda: any(e.is_terminal for e in system.results()), 60, worker.tail)
    worker.kill9()
    assert unfinished_passed(system) == []
    assert len(system.outcomes()) < COUNT, "the kill came too late to show anything"
    system.worker("w2", env={"PENSTOCK_WORKER__AGING_S": "5"}).wait_ready()
    finish_and_check(system, ids)


@pytest.mark.parametrize("moment", ["mid_stream@60", "before_commit@40", "before_terminal@40"])
def test_killed_at_a_fault_point(make_system: Callable[..., System], moment: str) -> None:
    system = make_system(models=[SLOW])
    ids = submit_all(system)
    worker = system.worker("w1", faults=f"kill:{moment}")
    assert worker.wait_dead(90) == -9, worker.tail()
    assert unfinished_passed(system) == []
    system.worker("w2").wait_ready()
    finish_and_check(system, ids)


def test_two_workers_one_killed_one_joining(make_system: Callable[..., System]) -> None:
    system = make_system(models=[SLOW])
    first, second = system.worker("w1"), system.worker("w2")
    first.wait_ready()
    second.wait_ready()
    ids = submit_all(system)
    eventually(lambda: sum(e.is_terminal for e in system.results()) > 20, 60, first.tail)
    first.kill9()
    third = system.worker("w3").wait_ready()
    finish_and_check(system, ids)
    assert second.stop() == 0, second.tail()
    assert third.stop() == 0, third.tail()
    assert system.lag() == 0
