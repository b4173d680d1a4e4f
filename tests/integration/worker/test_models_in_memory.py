"""Three real models of which two fit into the memory that may be granted: all is answered, and the limit holds.

The larger form, with 300 requests, runs with PENSTOCK_TEST_LONG=1.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.schemas.records import WorkerState
from sampling import held_by_engines, sampled
from support import engine_processes
from system import Process, System, eventually
from worker_requests import outcome, send

LONG = bool(os.environ.get("PENSTOCK_TEST_LONG"))
REQUESTS = 300 if LONG else 45
RATE = 10.0
MIB = 1 << 20
OPTIONS = {"cache_tokens": 4096, "slots": 8, "max_batch_tokens": 128}


def model(name: str, folder: Path, engine: str = "text") -> dict[str, Any]:
    task = "embedding" if engine == "embedding" else "text_generation"
    options = {"max_batch_tokens": 1024} if engine == "embedding" else OPTIONS
    return {
        "id": name,
        "source": str(folder),
        "engine": engine,
        "tasks": [task],
        "preload": False,
        "options": options,
    }


def request(number: int) -> dict[str, Any]:
    """One of three models in turns of fifteen, so that each load is followed by runs enough to be a life."""
    name = ("one", "two", "vectors")[number // 15 % 3]
    if name == "vectors":
        payload: dict[str, Any] = {"input": ["word " * (1 + number % 40)] * (1 + number % 5)}
        return {"request_id": f"r{number}", "task": "embedding", "model": name, "payload": payload}
    payload = {"prompt": "word " * (1 + 7 * number % 60), "max_tokens": 1 + 11 * number % 90}
    return {"request_id": f"r{number}", "model": name, "payload": payload}


def state(system: System) -> WorkerState:
    return system.worker_states()[-1]


def engines(worker: Process) -> list[psutil.Process]:
    return engine_processes(worker.popen.pid)


@pytest.mark.slow
def test_three_models_of_which_two_fit(make_system: Callable[..., System], tiny_lm: Path) -> None:
    limit = 210 * MIB
    models = [model("one", tiny_lm), model("two", tiny_lm), model("vectors", tiny_lm, "embedding")]
    env = {"PENSTOCK_DEVICES": json.dumps([{"kind": "cpu", "limit_bytes": limit, "reserve_bytes": 0}])}
    system = make_system(models=models, worker_options={"state_interval_s": 0.5})
    worker = system.worker(env=env).wait_ready()
    with sampled(held_by_engines, worker.popen.pid, 0.1) as samples:
        began = time.monotonic()
        for number in range(REQUESTS):
            time.sleep(max(0.0, began + number / RATE - time.monotonic()))
            send(system, request(number))
        for number in range(REQUESTS):
            assert outcome(system, f"r{number}", 240).status == "completed", worker.tail()
        holders = [holder for device in state(system).devices for holder in device.holders]
        assert holders
    assert samples.taken > 5
    assert samples.most <= limit, f"{samples.most / MIB:.0f} MiB"
    eventually(lambda: _books_are_right(system, worker), 60, worker.tail)
    evictions = state(system).evictions_total
    assert worker.stop() == 0, worker.tail()
    kept = json.loads(next(system.folder.rglob("memory.json")).read_text())
    assert kept["learned"], "the engine that lived to the end has taught what it took"
    print(
        f"{REQUESTS} requests at {RATE:g}/s: engines held {samples.most / MIB:.0f} of {limit / MIB:.0f} MiB at most, "
        f"{samples.taken} samples; evictions {evictions}; learned of {len(kept['learned'])}"
    )


@pytest.mark.slow
def test_an_engine_killed_in_mid_batch_leaves_the_books_right(
    make_system: Callable[..., System], tiny_lm: Path
) -> None:
    system = make_system(
        models=[model("one", tiny_lm), model("two", tiny_lm)], worker_options={"state_interval_s": 0.5}
    )
    worker = system.worker().wait_ready()
    ids = [f"{name}{n}" for name in ("one", "two") for n in range(8)]
    payload = {"prompt": "word", "max_tokens": 300}
    send(system, *({"request_id": i, "model": i[:3], "payload": payload, "stream": True} for i in ids))
    eventually(lambda: {e.request_id[:3] for e in system.results()} >= {"one", "two"}, 90, worker.tail)
    engines(worker)[0].kill()
    for request_id in ids:
        assert outcome(system, request_id, 180).status == "completed", worker.tail()
    again = {event.request_id[:3] for event in system.outcomes().values() if event.attempt > 1}
    assert len(again) <= 1, "the other engine's runs were none of its concern"
    eventually(lambda: _books_are_right(system, worker), 60, worker.tail)
    assert worker.stop() == 0, worker.tail()


def _books_are_right(system: System, worker: Process) -> bool:
    """The holders of the ledger are the engines that live, and what is reserved is what they hold."""
    (device,) = [one for one in state(system).devices if one.device == "cpu"]
    return len(device.holders) == len(engines(worker)) and device.reserved_bytes == sum(
        holder.bytes for holder in device.holders
    )
