"""The aims of `benchmarks/placement.py`: few loads, short waits, and little more time than the bound."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

PLACEMENT = runpy.run_path(str(Path(__file__).parents[5] / "benchmarks" / "placement.py"))


@pytest.mark.parametrize("trace", PLACEMENT["TRACES"], ids=lambda trace: trace.__name__)
def test_at_most_half_of_the_switches_of_fifo_and_high_work_waits_no_longer(trace: Any) -> None:
    rows = {row.policy: row for row in PLACEMENT["replay"](trace, scale=0.1)}
    ours, fifo, bound = rows["penstock"], rows["fifo"], rows["bound"]
    assert ours.switches <= fifo.switches / 2
    assert ours.p95_wait_s["high"] <= fifo.p95_wait_s["high"]
    assert ours.deadline_misses <= fifo.deadline_misses
    for row in rows.values():
        assert row.makespan_s >= bound.makespan_s
        assert row.switches >= bound.switches


@pytest.mark.slow
def test_5000_mixed_requests_take_hardly_longer_than_the_bound() -> None:
    ours, bound = PLACEMENT["replay"](PLACEMENT["batch"], policies=["penstock"])
    assert ours.makespan_s <= 1.1 * bound.makespan_s
    assert ours.deadline_misses == 0
