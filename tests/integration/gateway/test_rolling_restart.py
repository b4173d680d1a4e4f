"""Workers and gateways are stopped and started again one after another, under load: no call fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from penstock.cli.paths import free_port
from stream_clients import Callers
from support import wait_until
from system import Process, System
from worker_requests import engine

WORDS = 40
"""4 s: longer than the workers' drain, shorter than the gateways'."""
WHOLE = "".join(f"word{number} " for number in range(WORDS))
MODEL = engine(tokens=WORDS, delay_ms=100, slots=64)
PATIENCE_S = 60.0


class Load:
    """Clients of each kind that call until they are told to stop; a failure ends its client and is found by `end`."""

    def __init__(self, urls: list[str]) -> None:
        self._callers = Callers(urls, "noop", WORDS, PATIENCE_S)
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(16)
        self.done: dict[str, int] = {}
        self._clients: list[Future[None]] = [
            self._pool.submit(self._repeat, kind, number) for kind in self._callers.kinds for number in range(3)
        ]

    def _repeat(self, call: Callable[[int], str], number: int) -> None:
        name = call.__name__
        while not self._over.is_set():
            assert call(number) == WHOLE, name
            self.done[name] = self.done.get(name, 0) + 1
            number += 1

    @property
    def reconnects(self) -> int:
        return self._callers.reconnects

    def rounds(self) -> int:
        for client in self._clients:
            if client.done():
                client.result()
        return min(self.done.get(kind.__name__, 0) for kind in self._callers.kinds)

    def end(self) -> None:
        self._over.set()
        for client in self._clients:
            client.result(PATIENCE_S)
        self._pool.shutdown()


@pytest.mark.slow
def test_no_call_fails_in_a_rolling_restart(make_system: Callable[..., System]) -> None:
    system = make_system(models=[MODEL], worker_options={"drain_s": 1})
    ports = {"g1": free_port(), "g2": free_port()}
    parts: dict[str, Process] = {name: system.gateway(name, port=port) for name, port in ports.items()}
    parts |= {name: system.worker(name) for name in ("w1", "w2")}
    for part in parts.values():
        part.wait_ready()
    load = Load([parts["g1"].url, parts["g2"].url])
    try:
        for name in ("w1", "g1", "w2", "g2"):
            rounds = load.rounds()
            wait_until(lambda rounds=rounds: load.rounds() > rounds, PATIENCE_S, lambda: f"{load.done}")
            assert parts[name].stop() == 0, parts[name].tail()
            parts[name] = system.gateway(name, port=ports[name]) if name in ports else system.worker(name)
            parts[name].wait_ready()
    finally:
        load.end()
    assert load.reconnects > 0
    outcomes = system.outcomes()
    assert {event.status for event in outcomes.values()} == {"completed"}
    assert any(event.since is not None for event in outcomes.values()), "no run was handed to the other worker"
