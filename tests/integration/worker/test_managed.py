"""A managed server under a real worker: requests are answered by it, and it never outlives the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from support import alive, children_of
from system import System, eventually
from worker_requests import outcome, send

GB = 10**9
MESSAGES = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}


def below(pid: int) -> list[psutil.Process]:
    """The keepers of servers and all that is below them, each with its arguments."""
    return [process for child in children_of(pid) for process in keeper_and_below(child)]


def keeper_and_below(child: psutil.Process) -> list[psutil.Process]:
    try:
        is_keeper = any(part.endswith("keeper.py") for part in child.cmdline())
        return [child, *child.children(recursive=True)] if is_keeper else []
    except psutil.NoSuchProcess:
        return []


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if alive(one)]


@pytest.mark.slow
def test_a_killed_worker_leaves_nothing_of_its_servers(
    make_system: Callable[..., System], llama_cpp: dict[str, Any]
) -> None:
    """The command is a shell that starts the server beside a process in a session of its own."""
    server = " ".join(llama_cpp["options"]["command"])
    options = {**llama_cpp["options"], "command": ["sh", "-c", f"setsid sleep 600 & {server}; true"]}
    system = make_system(models=[{**llama_cpp, "options": options}])
    worker = system.worker().wait_ready()
    send(system, {"request_id": "r1", "payload": MESSAGES, "stream": True})
    done = outcome(system, "r1", 90)
    assert (done.status, done.device) == ("completed", "cpu"), (done, worker.tail())
    assert done.text_generation is not None
    assert done.text_generation["text"]
    processes = below(worker.popen.pid)
    assert len(processes) == 4, processes  # keeper, shell, sleep, server
    worker.kill9()
    eventually(lambda: not left(processes), 5, lambda: str(left(processes)))
    # The next worker is told to stop, and ends its server in order.
    worker = system.worker().wait_ready()
    send(system, {"request_id": "r2", "payload": MESSAGES})
    assert outcome(system, "r2", 90).status == "completed", worker.tail()
    processes = below(worker.popen.pid)
    assert worker.stop() == 0, worker.tail()
    assert not left(processes)


@pytest.mark.slow
def test_a_worker_that_stops_kills_a_keeper_that_hangs_and_names_it(make_system: Callable[..., System]) -> None:
    """Keeper and server are stopped (SIGSTOP) while the server loads."""
    options = {"command": ["sh", "-c", "while true; do :; done"]}
    hangs = {"id": "m", "source": "m", "engine": "managed", "vram_bytes": GB // 10, "preload": True, "options": options}
    worker = make_system(models=[hangs]).worker()
    eventually(lambda: len(below(worker.popen.pid)) == 2, 60, worker.tail)
    processes = below(worker.popen.pid)
    for process in processes:
        process.suspend()
    assert worker.stop() == 0, worker.tail()
    assert not left(processes)
    log = worker.log.read_text()
    assert f"the process {processes[0].pid} of m" in log.partition("worker.stopping waits_for=")[2].partition("\n")[0]
    assert "engine.does_not_end" not in log


@pytest.mark.slow
def test_a_server_on_two_devices_has_a_grant_on_each_and_gives_both_back(
    make_system: Callable[..., System], llama_cpp: dict[str, Any]
) -> None:
    """llama.cpp's server on two simulated cards that hold one model each: another one needs a card, and gets it."""
    options = {**llama_cpp["options"], "devices": 2, "env": {"SHARE": "{memory_fraction}", "COUNT": "{devices}"}}
    server = {**llama_cpp, "device": "simulated", "vram_bytes": 2 * GB, "options": options}
    other = {"id": "other", "source": "noop", "engine": "noop", "device": "simulated", "vram_bytes": 3 * GB}
    cards = [{"kind": "simulated", "name": f"sim{number}", "total_bytes": 4 * GB} for number in range(2)]
    system = make_system(
        models=[server, {**other, "preload": False}], devices=cards, worker_options={"state_interval_s": 0.5}
    )
    worker = system.worker().wait_ready()
    send(system, {"request_id": "r1", "model": server["id"], "payload": MESSAGES})
    done = outcome(system, "r1", 90)
    assert (done.status, (done.device or "")[:3]) == ("completed", "sim"), (done, worker.tail())
    both = {"sim0": [(server["id"], 2 * GB)], "sim1": [(server["id"], 2 * GB)]}
    eventually(lambda: holders(system) == both, 30, lambda: str(holders(system)))
    env = below(worker.popen.pid)[-1].environ()
    assert (env["CUDA_VISIBLE_DEVICES"], env["SHARE"], env["COUNT"]) == ("", "0.5000", "2")
    send(system, {"request_id": "r2", "model": "other"})
    assert outcome(system, "r2", 90).status == "completed", worker.tail()
    eventually(lambda: len(below(worker.popen.pid)) == 0, 30, lambda: str(below(worker.popen.pid)))
    eventually(lambda: sorted(holders(system).values()) == [[], [("other", 3 * GB)]], 30, lambda: str(holders(system)))
    assert worker.stop() == 0, worker.tail()


def holders(system: System) -> dict[str, list[tuple[str, int]]]:
    """Who holds which simulated device, as the worker said last."""
    devices = [one for state in system.worker_states()[-1:] for one in state.devices if one.kind == "simulated"]
    return {one.device: [(holder.model, holder.bytes) for holder in one.holders] for one in devices}
