"""Engines in main memory: what is booked is what they take, and what goes wrong with one leaves the books right."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.common.transport import Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.desired import key_of
from penstock.schemas.records import DesiredState
from sampling import held_bytes, sampled
from support import engine_processes
from system import Process, System, eventually
from worker_requests import outcome, send

pytestmark = pytest.mark.slow

LONG = bool(os.environ.get("PENSTOCK_TEST_LONG"))
MIB = 1 << 20
COUNTED_TWICE = MIB
"""Reading smaps is racy by its documentation (the kernel's proc.rst): pages that move meanwhile count twice."""
OPTIONS = {"cache_tokens": 4096, "slots": 8, "max_batch_tokens": 128}


def model(name: str, folder: Path, engine: str = "text", **fields: Any) -> dict[str, Any]:
    embedding = engine == "embedding"
    return {
        "id": name,
        "source": str(folder),
        "engine": engine,
        "tasks": ["embedding" if embedding else "text_generation"],
        "preload": False,
        "options": {"max_batch_tokens": 16_384} if embedding else OPTIONS,
        **fields,
    }


def engines(worker: Process) -> list[psutil.Process]:
    """By age."""
    return sorted(engine_processes(worker.popen.pid), key=lambda one: one.create_time())


def all_bytes(worker: Process) -> int:
    """What the worker and all that it started hold of their own."""
    pids = [worker.popen.pid, *(one.pid for one in psutil.Process(worker.popen.pid).children(recursive=True))]
    return sum(held_bytes(pid) for pid in pids)


def unload(system: System) -> None:
    """Until the next request asks for it."""
    order = DesiredState(kind="model", name="one", action="unload", created_at=1, loaded=False)
    transport = Transport(system.kafka)
    transport.send(system.names.desired, default_codec().encode(order), key=key_of(order).encode())
    transport.close()


def booked_bytes(system: System) -> int:
    (device,) = system.worker_states()[-1].devices
    return sum(holder.bytes for holder in device.holders)


def books_are_right(system: System, worker: Process) -> bool:
    """The holders of the ledger are the engines that live, and what is reserved is what they hold."""
    (device,) = [one for one in system.worker_states()[-1].devices if one.device == "cpu"]
    reserved = sum(holder.bytes for holder in device.holders)
    return len(device.holders) == len(engines(worker)) and device.reserved_bytes == reserved


def shape(number: int) -> dict[str, Any]:
    """Prompts and answers of lengths that come once."""
    payload = {"prompt": "word " * (3 + 37 * number % 211), "max_tokens": 1 + 29 * number % 97}
    return {"request_id": f"r{number}", "model": "one", "payload": payload}


@pytest.mark.thorough
@pytest.mark.alone
@pytest.mark.parametrize(
    "name", ["tiny_lm", pytest.param("smollm2", marks=pytest.mark.skipif(not LONG, reason="long"))]
)
def test_what_is_booked_is_what_the_engine_takes_and_all_of_it_comes_back(
    make_system: Callable[..., System], request: pytest.FixtureRequest, name: str
) -> None:
    folder: Path = request.getfixturevalue(name)
    system = make_system(models=[model("one", folder)], worker_options={"state_interval_s": 0.5})
    worker = system.worker().wait_ready()
    send(system, shape(1_000))
    outcome(system, "r1000", 120)
    unload(system)
    eventually(lambda: not engines(worker), 120, worker.tail)  # what the first load brings into the parent stays there
    start = all_bytes(worker)
    send(system, shape(0))
    eventually(lambda: bool(engines(worker)), 60, worker.tail)
    (engine,) = engines(worker)
    with sampled(held_bytes, engine.pid, 0.03) as samples:
        send(system, *(shape(number) for number in range(1, 51)))
        eventually(lambda: len(system.outcomes()) == 52, 240, worker.tail)
        assert {event.status for event in system.outcomes().values()} == {"completed"}
        measured = samples.most - COUNTED_TWICE
        assert engines(worker) == [engine], "one life"
        # A peak beyond what is booked is booked with the engine's next beat, and told with the next state.
        eventually(lambda: booked_bytes(system) >= measured, 10, lambda: f"{booked_bytes(system)} of {measured}")
        booked = booked_bytes(system)
    unload(system)
    eventually(lambda: not engines(worker), 120, worker.tail)
    end = all_bytes(worker)
    eventually(lambda: books_are_right(system, worker), 60, worker.tail)
    assert worker.stop() == 0, worker.tail()
    print(f"{name}: booked {booked / MIB:.0f} MiB, measured {measured / MIB:.0f}: {booked / measured:.3f}")
    print(f"{name}: {start / MIB:.1f} MiB before the load, {end / MIB:.1f} after it was unloaded: {end / start:.3f}")
    assert 1.0 <= booked / measured <= 1.15
    assert abs(end - start) <= 0.03 * start


def test_an_engine_killed_in_mid_load_is_loaded_again_and_troubles_nobody(
    make_system: Callable[..., System], tiny_lm: Path
) -> None:
    models = [model("one", tiny_lm), model("two", tiny_lm)]
    system = make_system(models=models, worker_options={"state_interval_s": 0.2})
    worker = system.worker().wait_ready()
    payload = {"prompt": "word", "max_tokens": 300}
    runs = [{"request_id": f"two{n}", "model": "two", "payload": payload, "stream": True} for n in range(6)]
    send(system, *runs)
    eventually(lambda: any(event.request_id == "two0" for event in system.results()), 90, worker.tail)
    (bystander,) = engines(worker)
    send(system, *({"request_id": f"one{n}", "model": "one"} for n in range(6)))
    deadline = time.monotonic() + 60
    while len(found := engines(worker)) < 2:
        assert time.monotonic() < deadline, worker.tail()
        time.sleep(0.002)
    (loading,) = [one for one in found if one != bystander]
    loading.kill()
    for request_id in [*(f"one{n}" for n in range(6)), *(f"two{n}" for n in range(6))]:
        found_outcome = outcome(system, request_id, 180)
        assert found_outcome.status == "completed", worker.tail()
        assert found_outcome.attempt == 1, "a load that fails costs no request an attempt"
    assert bystander in engines(worker)
    assert loading not in engines(worker)
    eventually(lambda: books_are_right(system, worker), 60, worker.tail)
    assert worker.stop() == 0, worker.tail()


def test_an_engine_that_runs_out_of_memory_troubles_nobody_else(
    make_system: Callable[..., System], tiny_lm: Path
) -> None:
    """The kernel itself refuses it more."""
    models = [model("vectors", tiny_lm, "embedding"), model("two", tiny_lm)]
    system = make_system(models=models, worker_options={"state_interval_s": 0.5})
    worker = system.worker().wait_ready()
    texts = {"input": ["word"]}
    send(system, {"request_id": "warm", "task": "embedding", "model": "vectors", "payload": texts})
    assert outcome(system, "warm", 120).status == "completed"
    (tight,) = engines(worker)
    lines = Path(f"/proc/{tight.pid}/status").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024
    payload = {"prompt": "word", "max_tokens": 200}
    runs = [{"request_id": f"two{n}", "model": "two", "payload": payload, "stream": True} for n in range(4)]
    send(system, *runs)
    eventually(lambda: any(event.request_id == "two0" for event in system.results()), 90, worker.tail)
    resource.prlimit(tight.pid, resource.RLIMIT_DATA, (held + 80 * MIB, held + 80 * MIB))
    large = {"input": [f"{n} " + "word " * 300 for n in range(54)]}
    send(system, {"request_id": "large", "task": "embedding", "model": "vectors", "payload": large})
    assert outcome(system, "large", 180).status == "completed", worker.tail()
    for n in range(4):
        found = outcome(system, f"two{n}", 180)
        assert (found.status, found.attempt) == ("completed", 1), worker.tail()
    told = httpx.get(worker.url + "/metrics").text
    name = 'penstock_engine_out_of_memory_total{model="vectors"}'
    counted = [line for line in told.splitlines() if line.startswith(name)]
    assert counted, "the kernel refused nothing: the limit is too large for this test"
    assert float(counted[0].split()[-1]) >= 1
    assert tight in engines(worker), "it survived"
    eventually(lambda: books_are_right(system, worker), 60, worker.tail)
    assert worker.stop() == 0, worker.tail()
