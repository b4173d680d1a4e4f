"""A managed server under a real worker: requests are answered by it, and it never outlives the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest

from system import System, eventually
from worker_requests import outcome, send

MESSAGES = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}


def below(pid: int) -> list[psutil.Process]:
    """The keepers of servers and all that is below them, each with its arguments."""
    children = psutil.Process(pid).children()
    keepers = [child for child in children if any(part.endswith("keeper.py") for part in child.cmdline())]
    return [process for keeper in keepers for process in (keeper, *keeper.children(recursive=True))]


def left(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


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
