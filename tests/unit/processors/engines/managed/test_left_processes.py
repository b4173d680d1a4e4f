"""A managed server that SIGKILL does not end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from penstock.processors.engines.base import EngineState
from penstock.processors.engines.managed import engine as engine_module
from penstock.processors.engines.managed import server_process
from penstock.processors.engines.managed.engine import ManagedEngine
from support import wait_until_async

COMMAND = [sys.executable, "-m", "http.server", "--bind", "{host}", "{port}"]


async def test_a_server_that_sigkill_does_not_end_is_dead_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    options = {"command": COMMAND, "health": "/", "silent_s": 2, "tasks": ["text_generation"]}
    engine = ManagedEngine("m", "m", options, granted_bytes=1 << 30, total_bytes=1 << 34, logs=tmp_path)
    engine.on_died = codes.append
    await engine.start()
    keeper = engine.pid
    assert keeper is not None
    stopped = [one.pid for one in server_process.tree(keeper)]  # as if the kernel held them in a call of a driver
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        await wait_until_async(lambda: codes)
        assert (codes, engine.state, engine.left_pid) == ([-1], EngineState.DEAD, keeper)
        await engine.stop()  # does not wait for it longer
        assert engine.left_pid == keeper
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    await wait_until_async(lambda: engine.left_pid is None)
    assert codes == [-1], "told once"
    assert server_process.tree(keeper) == []
