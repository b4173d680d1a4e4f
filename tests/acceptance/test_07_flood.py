"""Point 7: a flood of low work stays within the commit span, and a high request passes it."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil
import pytest

from penstock.producers import Client
from system import System, eventually

pytestmark = pytest.mark.alone

FLOOD = 2_000
CAP = 128
"""In flight: four partitions of the low topic with a commit span of a quarter each."""
SLOW = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": 1, "delay_ms": 20, "slots": 4},
}


def test_a_flood_stays_bounded_and_high_work_passes(make_system: Callable[..., System]) -> None:
    system = make_system(models=[SLOW], worker_options={"commit_span": CAP // 4, "aging_s": 600})
    worker = system.worker().wait_ready()
    memory_before = psutil.Process(worker.popen.pid).memory_full_info().uss
    with Client(system.kafka) as client:
        for n in range(FLOOD):
            client.submit(task="text_generation", payload={"prompt": f"low {n}"}, priority=9)
        eventually(lambda: worker.metric("penstock_inflight") > CAP / 4, 30, worker.tail)
        high = client.submit(task="text_generation", payload={"prompt": "high"}, priority=0)
        peak = 0.0
        give_up = time.monotonic() + 60
        while high.request_id not in (done := system.outcomes()):
            peak = max(peak, worker.metric("penstock_inflight"))
            assert time.monotonic() < give_up, worker.tail()
        assert len(done) < FLOOD, "the flood had ended before the high request was sent"
        # At most what ran when it came, and what was dispatched before the result topic was read, stands before it.
        terminal = [event for event in system.results() if event.is_terminal]
        sent = next(event.origin.append_time_ms for event in terminal if event.request_id == high.request_id)
        ended = next(event.created_at for event in terminal if event.request_id == high.request_id)
        between = sum(sent <= event.created_at < ended for event in terminal)
        assert between < 64, f"{between} low requests ended between the high request's arrival and its end"
    eventually(lambda: system.lag() == 0, 180, worker.tail)
    # Each partition stops at its span, but for the batch that was fetched when it came there.
    assert peak <= FLOOD / 4, f"in flight peaked at {peak}"
    grown = psutil.Process(worker.popen.pid).memory_full_info().uss - memory_before
    assert grown < 200 * 2**20, f"the worker grew by {grown / 2**20:.0f} MiB"
    assert len(system.outcomes()) == FLOOD + 1
