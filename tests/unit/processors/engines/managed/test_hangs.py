"""A managed server that hangs while it loads, one that SIGKILL does not end, and a keeper that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.processors.engines.base import EngineState
from penstock.processors.engines.managed import engine as engine_module
from penstock.processors.engines.managed import server_process
from penstock.processors.engines.managed.engine import ManagedEngine
from penstock.processors.engines.managed.server_process import tree
from penstock.schemas.errors import EngineFailed
from support import alive, wait_until_async

SILENT_S = 1.5
HEALTHY_AFTER_S = 2 * SILENT_S
SERVER = """
import subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
began = time.monotonic()
def loading(): return time.monotonic() < began + {healthy_after}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if loading() else 200)
        self.end_headers()
    def log_message(self, *args): pass
{load}
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
LOADS = {
    "computes": "while loading(): pass",
    "reads": "while loading(): open(sys.executable, 'rb').read(1 << 20); time.sleep(0.3)",
    "prints": "while loading(): print('weights', flush=True); time.sleep(0.3)",
    "answers": "",
    "a child computes": "subprocess.run(['setsid', sys.executable, '-c', 'import time; t = time.monotonic()\\n"
    "while time.monotonic() < t + {healthy_after}: pass'])",
}
Make = Callable[..., ManagedEngine]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    async with AsyncExitStack() as stack:

        def made(*command: str, **options: Any) -> ManagedEngine:
            options = {"command": list(command), "silent_s": SILENT_S, "tasks": ["text_generation"], **options}
            engine = ManagedEngine("m", "m", options, granted_bytes=1 << 30, total_bytes=1 << 34, logs=tmp_path)
            stack.push_async_callback(engine.stop)
            return engine

        yield made


async def test_a_server_that_sleeps_while_it_loads_is_ended(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make("sleep", "1000")
    began = time.monotonic()
    with pytest.raises(EngineFailed, match="gave no sign of life"):
        await engine.start()
    assert time.monotonic() - began < 4 * SILENT_S
    assert "engine.silent model=m state=starting" in caplog.text
    assert engine.pid is not None
    assert tree(engine.pid) == []


async def test_a_server_that_is_stopped_while_it_loads_is_ended(make: Make) -> None:
    engine = make(sys.executable, "-c", "while True: pass")
    starting = asyncio.create_task(engine.start())
    await wait_until_async(lambda: engine.pid is not None and len(tree(engine.pid)) == 2)
    assert engine.pid is not None
    await asyncio.sleep(2 * SILENT_S)
    assert not starting.done()
    os.kill(tree(engine.pid)[1].pid, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match="gave no sign of life"):
        await asyncio.wait_for(starting, 10)
    assert tree(engine.pid) == []


@pytest.mark.parametrize("load", list(LOADS))
async def test_a_server_that_works_is_loaded_however_long_it_takes(make: Make, load: str) -> None:
    script = SERVER.replace("{load}", LOADS[load]).replace("{healthy_after}", str(HEALTHY_AFTER_S))
    engine = make(sys.executable, "-c", script, "{port}")
    await engine.start()
    assert engine.state is EngineState.READY


@pytest.mark.parametrize("loads", [True, False])
async def test_a_stopped_keeper_is_killed_with_its_server(
    make: Make, loads: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with a process in a session of its own."""
    monkeypatch.setattr(server_process, "KEEPER_WITHIN_S", 0.5)
    load = "subprocess.Popen(['setsid', 'sleep', '600'])" + ("; time.sleep(600)" if loads else "")
    script = SERVER.replace("{load}", load).replace("{healthy_after}", "0")
    engine = make(sys.executable, "-c", script, "{port}", grace_s=0.5, silent_s=60)
    starting = asyncio.create_task(engine.start())
    await wait_until_async(lambda: engine.pid is not None and len(tree(engine.pid)) == 3)
    assert engine.pid is not None
    if not loads:
        await starting
    members = tree(engine.pid)
    for process in members:
        process.suspend()
    began = time.monotonic()
    starting.cancel()
    await asyncio.wait([starting])
    await engine.stop()
    assert time.monotonic() - began < 5
    assert not any(map(alive, members))
    assert engine.left_pid is None
    assert "managed.keeper_hangs" in caplog.text
    assert "engine.does_not_end" not in caplog.text


async def test_a_server_that_sigkill_does_not_end_is_dead_all_the_same(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (engine_module, "CHECK_S"),
        (engine_module, "PROBE_TIMEOUT_S"),
        (server_process, "KEEPER_WITHIN_S"),
        (server_process, "DEAD_WITHIN_S"),
    ):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(server_process, "kill_all", lambda processes: None)
    codes: list[int] = []
    command = [sys.executable, "-m", "http.server", "--bind", "{host}", "{port}"]
    engine = make(*command, health="/", silent_s=2)
    engine.on_died = codes.append
    await engine.start()
    keeper = engine.pid
    assert keeper is not None
    stopped = [one.pid for one in tree(keeper)]  # as if the kernel held them in a call of a driver
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        await wait_until_async(lambda: codes)
        assert (codes, engine.state, engine.left_pid) == ([-1], EngineState.DEAD, keeper)
        await engine.stop()  # does not wait for it longer
        assert engine.left_pid == keeper
    finally:
        for pid in reversed(stopped):  # the keeper last: it ends the others at once
            os.kill(pid, signal.SIGCONT)
    await wait_until_async(lambda: engine.left_pid is None)
    assert codes == [-1], "told once"
    assert tree(keeper) == []
