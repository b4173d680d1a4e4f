"""A consumer that stops fetching with lag before it: the worker ends itself, and its next life does the work."""

from __future__ import annotations

from collections.abc import Callable

from system import System
from worker_requests import send


def test_a_stalled_worker_exits_to_be_restarted(make_system: Callable[..., System]) -> None:
    system = make_system(worker_options={"stall_s": 3})
    worker = system.worker("w1", faults="stall:fetch@1").wait_ready()
    ids = [f"r{n}" for n in range(100)]
    send(system, *({"request_id": i} for i in ids))
    assert worker.wait_dead(60) == 1, worker.tail()
    assert "worker.stalled" in worker.tail(200)
    system.worker("w2").wait_ready()
    system.wait_drained(60)
    assert set(system.outcomes()) == set(ids)
