"""A store of artifacts that takes connections and never answers: what needs it waits, the worker lives and goes on."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from system import System, eventually, free_port
from worker_requests import outcome, send

STALL_S = 3
LARGE = {"id": "large", "source": "noop", "engine": "noop", "tasks": ["text_generation"]} | {
    "options": {"tokens": 1, "chars": 400_000, "slots": 20}
}
SMALL = {"id": "small", "source": "noop", "engine": "noop", "tasks": ["text_generation"]}


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield server


def test_large_outputs_wait_and_the_worker_goes_on(make_system: Callable[..., System], silent: socket.socket) -> None:
    system = make_system(models=[LARGE, SMALL], worker_options={"stall_s": STALL_S})
    endpoint = f'{{"aws_endpoint": "http://127.0.0.1:{silent.getsockname()[1]}", "allow_http": "true"}}'
    port = free_port()
    settings = {
        "PENSTOCK_WORKER__HEALTH_PORT": str(port),
        "PENSTOCK_WORKER__DATA_DIR": str(system.folder / "w1"),
        "PENSTOCK_ARTIFACTS__LOCATION": "s3://bucket/x",
        "PENSTOCK_ARTIFACTS__OPTIONS": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "here",
    }
    worker = system.start("worker", "w1", port, settings).wait_ready()
    send(system, *({"request_id": f"large{n}", "model": "large"} for n in range(20)))
    silent.settimeout(30)
    taken = [silent.accept()[0] for _ in range(4)]  # the store has taken calls, which hang from here on
    began, number = time.monotonic(), 0
    while time.monotonic() - began < 3 * STALL_S:
        send(system, {"request_id": f"small{number}", "model": "small"})
        assert outcome(system, f"small{number}", 20).status == "completed", worker.tail()
        number += 1
    assert worker.alive(), worker.tail()
    eventually(worker.ready, 20, worker.tail)
    assert not any(one.startswith("large") for one in system.outcomes()), "they have no outcome yet"
    for connection in taken:
        connection.close()
