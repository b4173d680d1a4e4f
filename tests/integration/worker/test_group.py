"""Several workers in one group: partitions move, members are fenced, and each request still has one visible outcome."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from system import System, eventually
from worker_requests import engine, outcome, send, turn

Make = Callable[..., System]

SLOW = engine(tokens=5, delay_ms=20, slots=8)
QUICK_GROUP = {"session_timeout_s": 6, "heartbeat_s": 1}


def assigned(process: Any) -> int:
    return int(httpx.get(process.url + "/healthz", timeout=5).json()["assigned"])


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
    eventually(lambda: assigned(second) == 10 and assigned(first) == 10, 30, second.tail)
    assert first.stop() == 0, first.tail()
    eventually(lambda: assigned(second) == 20, 30, second.tail)
    system.wait_drained(60)
    check(system, ids)
    assert second.stop() == 0, second.tail()
    assert system.lag() == 0


@pytest.mark.slow
def test_a_killed_worker_is_replaced(make_system: Make) -> None:
    system = make_system(models=[SLOW], worker_options=QUICK_GROUP)
    first, second = system.worker("w1").wait_ready(), system.worker("w2").wait_ready()
    eventually(lambda: assigned(first) == assigned(second) == 10, 30, first.tail)
    ids = submit(system, 120)
    eventually(lambda: sum(e.is_terminal for e in system.results()) > 10, 30, first.tail)
    first.kill9()
    system.wait_drained(60)
    check(system, ids)


@pytest.mark.slow
def test_a_stopped_process_comes_back_as_a_zombie_and_nothing_of_it_counts(make_system: Make) -> None:
    """SIGSTOP beyond the session timeout: the other takes over; the zombie's words are not seen, and it works again."""
    system = make_system(models=[engine(tokens=40, delay_ms=50, slots=8)], worker_options=QUICK_GROUP)
    first, second = system.worker("w1").wait_ready(), system.worker("w2").wait_ready()
    eventually(lambda: assigned(first) == assigned(second) == 10, 30, first.tail)
    ids = submit(system, 24)
    eventually(lambda: sum(e.kind == "chunk" for e in system.results()) > 20, 30, first.tail)
    first.popen.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: assigned(second) == 20, 30, second.tail)
        eventually(lambda: sum(e.is_terminal for e in system.results()) > 12, 60, second.tail)
    finally:
        first.popen.send_signal(signal.SIGCONT)
    eventually(lambda: assigned(first) == 10, 60, first.tail)
    system.wait_drained(60)
    check(system, ids)
    by_request: dict[str, set[int]] = {}
    for event in system.results():
        if event.is_terminal:
            by_request.setdefault(event.request_id, set()).add(event.epoch)
    outcomes = system.outcomes()
    assert all(len({outcomes[i].output_text}) == 1 for i in ids)
    assert first.stop() == 0, first.tail()
    assert second.stop() == 0, second.tail()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_conversation_goes_on_in_the_worker_that_takes_it_over(make_system: Make) -> None:
    system = make_system(models=[engine(echo=True)], worker_options=QUICK_GROUP)
    first = system.worker("w1").wait_ready()
    send(system, turn("r0", "one"))
    assert outcome(system, "r0").status == "completed"
    first.kill9()
    system.worker("w2").wait_ready()
    send(system, turn("r1", "two"))
    event = outcome(system, "r1", 60)
    assert '"one"' in (event.output_text or "")


def texts(system: System) -> int:
    """Chunks with text: a claim to a stream is written before the engine has it, so a death after it counts as none."""
    return sum(event.text_offset is not None for event in system.results())


@pytest.mark.thorough
@pytest.mark.slow
def test_what_ran_at_two_deaths_runs_alone_and_at_the_limit_is_dead_lettered(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=200, delay_ms=50, slots=8)], worker_options=QUICK_GROUP)
    send(system, {"request_id": "bad", "stream": True, "max_attempts": 3})
    for _ in range(3):
        worker = system.worker("w1").wait_ready()  # the same data folder each time
        seen = texts(system)
        eventually(lambda seen=seen: texts(system) > seen, 60, worker.tail)
        worker.kill9()
    system.worker("w1").wait_ready()
    event = outcome(system, "bad", 60)
    assert event.status == "dead_lettered"
    assert system.dead_letters()[-1].reason_code == "engine_failed"


@pytest.mark.thorough
def test_a_flood_of_low_work_stays_within_the_commit_span(make_system: Make, tmp_path: Path) -> None:
    system = make_system(
        models=[engine(tokens=1, delay_ms=20, slots=4)], worker_options={"commit_span": 16, "aging_s": 600}
    )
    worker = system.worker().wait_ready()
    ids = submit(system, 2_000, priority=9, stream=False)
    send(system, {"request_id": "urgent", "priority": 0})
    began = time.monotonic()
    peak = 0.0
    while "urgent" not in system.outcomes():
        text = httpx.get(worker.url + "/metrics", timeout=5).text
        peak = max(
            peak, float(next(line for line in text.splitlines() if line.startswith("penstock_inflight ")).split()[1])
        )
        assert time.monotonic() - began < 60, worker.tail()
    assert len(system.outcomes()) < len(ids), "the flood had ended before"
    assert peak <= 5 * 4 * 16 + 128, "each partition at its span, and what was handed over before it paused"
    system.wait_drained(60)
    check(system, ids)
