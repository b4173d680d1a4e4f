"""The broker stands still under load and comes back: what was committed stays committed (#13)."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from load import Follower, produce_all
from support import wait_until
from system import System
from worker_requests import engine

PAUSES = int(os.environ.get("PENSTOCK_TEST_PAUSES", "2"))
PAUSE_S = float(os.environ.get("PENSTOCK_TEST_PAUSE_S", "25"))
"""More than twice the session: the group is joined anew after each pause."""
COUNT = 30_000


@contextmanager
def standing_still(process: Any) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


class Committed:
    """The highest committed offsets seen, and each time that one fell."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.highest: dict[tuple[str, int], int] = {}
        self.falls: list[str] = []

    def look(self) -> None:
        now = self._system.committed()
        for tp, before in self.highest.items():
            if now.get(tp, -1) < before:
                self.falls.append(f"{tp}: {before} → {now.get(tp)}")
        self.highest = {**self.highest, **now}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PENSTOCK_TEST_LONG"), reason="three minutes: PENSTOCK_TEST_LONG=1 runs it")
def test_committed_offsets_never_fall_after_a_broker_pause(make_system: Callable[..., System], kafka: Any) -> None:
    """The broker is stopped in the midst of 30,000 requests of two workers, each time for longer than the session.
    No committed offset is ever lower than before, and nothing that was committed before a pause runs again after it.
    """
    process = getattr(kafka, "process", None)
    if process is None:
        pytest.skip("this test stops the broker, and PENSTOCK_TEST_KAFKA names one that is not ours")
    system = make_system(models=[engine(tokens=1, delay_ms=20, slots=8)])
    worker = system.worker("w1")
    workers = [system.worker("w2").wait_ready(), worker.wait_ready()]
    ids = [f"r{number}" for number in range(COUNT)]
    produce_all(system, ({"request_id": i, "priority": (1, 5, 9)[n % 3]} for n, i in enumerate(ids)))
    committed = Committed(system)
    done_before: dict[str, int] = {}
    """Request → how often it had ended when it was first seen to be committed."""
    with Follower(system) as seen:
        for number in range(PAUSES):
            more = len(seen.update().terminals) + 3_000
            wait_until(lambda more=more: len(seen.update().terminals) > more, 90, worker.tail)
            committed.look()
            ended = Counter(event.request_id for event in seen.update(0.5).events if event.is_terminal)
            for i, event in seen.terminals.items():
                if event.origin.offset < committed.highest.get((event.origin.topic, event.origin.partition), 0):
                    done_before.setdefault(i, ended[i])
            assert len(done_before) > 1_000, f"hardly anything was committed before pause {number + 1}"
            with standing_still(process):
                time.sleep(PAUSE_S)

            def goes_on(count: int = len(seen.terminals)) -> bool:
                committed.look()
                return bool(committed.falls) or len(seen.update().terminals) > count + 500

            wait_until(goes_on, 90, worker.tail, poll_s=0.2)
            assert committed.falls == [], worker.tail(60)
        seen.wait(ids, 120, worker.tail)
        system.wait_drained(60)
        committed.look()
        ends = Counter(event.request_id for event in seen.update(0.5).events if event.is_terminal)
    assert committed.falls == []
    assert [i for i, count in done_before.items() if ends[i] > count] == []
    assert all(one.alive() for one in workers), worker.tail()
