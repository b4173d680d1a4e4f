"""What was running at two deaths of a worker runs alone the third time, or is dead-lettered at its max_attempts."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from penstock.schemas.records import ResultEvent
from system import System, eventually
from worker_requests import engine, outcome, send, statuses

SLACK_MS = 500
"""A run takes 2,000 ms. Its event is made a moment after it ended, when the next may have begun."""


def run_span(event: ResultEvent) -> tuple[int, int]:
    """Begin and end of the run, in wall-clock milliseconds."""
    return event.created_at - event.timings.run_ms, event.created_at


def apart(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[1] <= one[0] + SLACK_MS or other[0] >= one[1] - SLACK_MS


@pytest.mark.slow
def test_two_deaths_and_it_runs_alone(make_system: Callable[..., System]) -> None:
    system = make_system(models=[engine(tokens=1, first_delay_ms=2_000, slots=8)])
    suspects = ["s1", "s2", "last"]
    send(system, {"request_id": "s1"}, {"request_id": "s2"}, {"request_id": "last", "max_attempts": 2})
    for life in (1, 2):
        worker = system.worker("w1").wait_ready()

        def all_run(life: int = life) -> bool:
            return all(statuses(system, one).count("running") >= life for one in suspects)

        eventually(all_run, 60, worker.tail)
        worker.kill9()
    send(system, *({"request_id": f"new{n}"} for n in range(4)))
    worker = system.worker("w1").wait_ready()
    system.wait_drained(90)
    assert outcome(system, "last").status == "dead_lettered", worker.tail()
    letter = next(one for one in system.dead_letters() if one.request_id == "last")
    assert json.loads(letter.original)["max_attempts"] == 2
    spans = {one: run_span(outcome(system, one)) for one in ("s1", "s2", "new0", "new1", "new2", "new3")}
    assert {outcome(system, one).status for one in spans} == {"completed"}
    for suspect in ("s1", "s2"):
        begin, end = spans[suspect]
        others = [span for one, span in spans.items() if one != suspect]
        assert all(apart((begin, end), other) for other in others), spans
