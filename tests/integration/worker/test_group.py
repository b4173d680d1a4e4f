"""Several workers in one group: partitions move, members are fenced, and each request still has one visible outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from system import System, eventually
from worker_requests import engine, send

Make = Callable[..., System]

SLOW = engine(tokens=5, delay_ms=20, slots=8)
QUICK_GROUP = {"session_timeout_s": 6, "heartbeat_s": 1}


def submit(system: System, count: int, **fields: Any) -> list[str]:
    ids = [f"r{n}" for n in range(count)]
    send(system, *({"request_id": i, "stream": True, "priority": n % 10, **fields} for n, i in enumerate(ids)))
    return ids


def check(system: System, ids: list[str]) -> None:
    outcomes = system.outcomes()
    assert {i: outcomes[i].status for i in ids if i in outcomes} == dict.fromkeys(ids, "completed")


@pytest.mark.slow
def test_partitions_move_to_a_joining_and_from_a_leaving_worker(make_system: Make) -> None:
    system = make_system(models=[SLOW], worker_options=QUICK_GROUP)
    first = system.worker("w1").wait_ready()
    ids = submit(system, 200)
    eventually(lambda: sum(e.is_terminal for e in system.results()) > 10, 30, first.tail)
    second = system.worker("w2").wait_ready()
    eventually(lambda: second.assigned() == 10 and first.assigned() == 10, 30, second.tail)
    assert first.stop() == 0, first.tail()
    eventually(lambda: second.assigned() == 20, 30, second.tail)
    system.wait_drained(60)
    check(system, ids)
    assert second.stop() == 0, second.tail()
    assert system.lag() == 0
