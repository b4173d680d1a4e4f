"""The broker stands still under load and comes back: what was committed stays committed (#13)."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from load import Follower, produce_all
from support import wait_until
from system import System, eventually
from worker_requests import engine

PAUSE_S = float(os.environ.get("PENSTOCK_TEST_PAUSE_S", "40"))
COUNT = 30_000


@pytest.mark.slow
def test_committed_offsets_never_fall_after_a_broker_pause(make_system: Callable[..., System], kafka: Any) -> None:
    """The broker's process is stopped for PAUSE_S in the midst of 30,000 requests, then goes on. No committed offset is
    ever lower than before, and nothing that was committed at the pause runs again.
    """
    process = getattr(kafka, "process", None)
    if process is None:
        pytest.skip("this test stops the broker, and PENSTOCK_TEST_KAFKA names one that is not ours")
    system = make_system(models=[engine(tokens=1, delay_ms=20, slots=64)])
    worker = system.worker().wait_ready()
    ids = [f"r{number}" for number in range(COUNT)]
    produce_all(system, ({"request_id": i, "priority": (1, 5, 9)[n % 3]} for n, i in enumerate(ids)))
    with Follower(system) as seen:
        wait_until(lambda: len(seen.update().terminals) > 5_000, 60, worker.tail)
        eventually(lambda: sum(system.committed().values()) > 1_000, 30, worker.tail)
        committed = highest = system.committed()
        process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(PAUSE_S)
        finally:
            process.send_signal(signal.SIGCONT)
        falls: list[str] = []

        def drained() -> bool:
            nonlocal highest
            now = system.committed()
            falls.extend(f"{tp}: {highest[tp]} → {now.get(tp)}" for tp in highest if now.get(tp, -1) < highest[tp])
            highest = {**highest, **now}
            return bool(falls) or set(ids) <= set(seen.update().terminals)

        wait_until(drained, 150, worker.tail, poll_s=0.3)
        assert falls == []
        system.wait_drained(60)
        ends = Counter(event.request_id for event in seen.update(0.5).events if event.is_terminal)
        places = {i: (e.origin.topic, e.origin.partition, e.origin.offset) for i, e in seen.terminals.items()}
        again = [i for i, (t, p, offset) in places.items() if offset < committed.get((t, p), 0) and ends[i] > 1]
    assert again == []
    assert set(ids) <= set(ends)
    assert worker.alive()
