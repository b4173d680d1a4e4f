"""The broker goes away under load and comes back: the worker waits, goes on by itself and loses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from system import System, eventually
from worker_requests import engine, send, turn


@pytest.mark.slow
@pytest.mark.parametrize(
    "away_s",
    [
        pytest.param(0.0, id="a restart", marks=pytest.mark.thorough),
        pytest.param(15.0, id="longer than the session"),
    ],
)
def test_the_worker_outlives_its_broker(make_system: Callable[..., System], kafka: Any, away_s: float) -> None:
    system = make_system(
        models=[engine(tokens=10, delay_ms=20, slots=8)], worker_options={"session_timeout_s": 6, "heartbeat_s": 1}
    )
    worker = system.worker().wait_ready()
    ids = [f"r{n}" for n in range(150)]
    send(system, *({"request_id": i, "stream": True} for i in ids))
    send(system, *(turn(f"t{n}", f"turn {n}") for n in range(10)))
    eventually(lambda: len(system.outcomes()) > 5, 60, worker.tail)
    kafka.stop()
    time.sleep(away_s)
    kafka.start()
    send(system, {"request_id": "after"})
    system.wait_drained(120)
    outcomes = system.outcomes()
    wanted = {*ids, *(f"t{n}" for n in range(10)), "after"}
    assert {i: outcomes[i].status for i in wanted if i in outcomes} == dict.fromkeys(wanted, "completed")
    assert worker.alive(), worker.tail()
    assert worker.stop() == 0, worker.tail()
