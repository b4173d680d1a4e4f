"""Request topics that have lost records: the worker says so once, begins where the setting wants it, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from broker_files import lose_logs
from penstock.processors.core.commit import donemap
from support import ask_broker, wait_until
from system import Process, System, eventually
from worker_requests import send

Make = Callable[..., System]
SAID = "group.log_truncated"


def commit_beyond_the_ends(system: System, by: int = 50) -> None:
    """As after a loss at the broker: the group has committed offsets, and maps, that its logs do not reach."""
    ends = {tp: end for tp, end in system.ends(system.names.request_topics()).items() if end}
    assert ends, "no request stands on any topic"
    offsets = {tp: end + by for tp, end in ends.items()}
    commits = [TopicPartition(*tp, at, donemap.encode(at, [(at + 1, at + 9)])) for tp, at in offsets.items()]
    consumer = Consumer({"bootstrap.servers": system.bootstrap, "group.id": system.group})
    try:
        ask_broker(lambda: consumer.commit(offsets=commits, asynchronous=False))
    finally:
        consumer.close()


def send_some(system: System, name: str, count: int = 12) -> set[str]:
    ids = [f"{name}{number}" for number in range(count)]
    send(system, *({"request_id": one} for one in ids))
    return set(ids)


def wait_completed(system: System, ids: set[str], deadline_s: float = 60) -> None:
    def completed() -> bool:
        outcomes = system.outcomes()
        return all(one in outcomes and outcomes[one].status == "completed" for one in ids)

    eventually(completed, deadline_s, lambda: f"{ids - system.outcomes().keys()} are missing\n{system.logs(30)}")


def lines(worker: Process) -> list[str]:
    """What it said of lost logs."""
    return [line for line in worker.log.read_text().splitlines() if SAID in line]


def of(tp: tuple[str, int], line: str) -> bool:
    return f"topic={tp[0]} partition={tp[1]} " in line


def test_what_a_shorter_log_holds_runs_and_it_is_said_once(make_system: Make) -> None:
    system = make_system()
    ids = send_some(system, "a")
    commit_beyond_the_ends(system)
    filled = len(system.committed())
    worker = system.worker().wait_ready()
    wait_completed(system, ids)
    said = lines(worker)
    assert len(said) == filled, worker.tail()
    assert all("ERROR" in line and "begins=0" in line for line in said)
    assert worker.metric("penstock_offset_resets_total", reason="log_truncated") == filled
    system.wait_drained()
    assert worker.stop() == 0
    second = system.worker("w2").wait_ready()
    wait_completed(system, send_some(system, "b"))
    assert lines(second) == []
    assert second.stop() == 0


@pytest.mark.slow
def test_a_log_that_is_lost_under_a_running_worker(make_system: Make, kafka: Any) -> None:
    system = make_system()
    worker = system.worker().wait_ready()
    wait_completed(system, send_some(system, "a"))
    system.wait_drained()
    lost = [tp for tp, end in system.ends(system.names.request_topics()).items() if end]
    lose_logs(kafka, lost)
    # A log that grows to the commit before this member looks at it cannot be told from a whole one.
    wait_until(lambda: all(any(of(tp, line) for line in lines(worker)) for tp in lost), 90, worker.tail)
    wait_completed(system, send_some(system, "b", 8))
    assert worker.ready(), worker.tail()
    system.wait_drained()
    assert worker.stop() == 0
    assert len(lines(worker)) == len(lost), lines(worker)
    second = system.worker("w2").wait_ready()
    wait_completed(system, send_some(system, "c"))
    assert lines(second) == []
