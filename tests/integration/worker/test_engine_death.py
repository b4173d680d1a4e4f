"""An engine's process dies: what ran on it runs again in place, with the next attempt, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support import engine_processes
from system import System, eventually
from worker_requests import outcome, send, statuses

MESSAGES = {"messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 200}


@pytest.mark.slow
def test_a_killed_engine_runs_its_requests_again(make_system: Callable[..., System], tiny_lm: Path) -> None:
    model = {"id": "tiny", "source": str(tiny_lm), "engine": "text", "tasks": ["text_generation"]}
    system = make_system(models=[model])
    worker = system.worker().wait_ready()
    send(system, {"request_id": "warm", "payload": {**MESSAGES, "max_tokens": 4}})
    assert outcome(system, "warm", 90).status == "completed", worker.tail()
    ids = [f"r{n}" for n in range(60)]
    send(system, *({"request_id": i, "payload": MESSAGES, "stream": True} for i in ids))
    eventually(lambda: any(e.request_id in ids for e in system.results()), 60, worker.tail)
    for engine in engine_processes(worker.popen.pid):
        engine.kill()
    for request_id in ids:
        assert outcome(system, request_id, 120).status == "completed", worker.tail()
    eventually(lambda: system.lag() == 0, 20, worker.tail)
    again = [event.request_id for event in system.outcomes().values() if event.attempt == 2]
    assert again, "all runs were over before the engine was killed"
    assert "retrying" in statuses(system, again[0])
    assert worker.stop() == 0, worker.tail()
