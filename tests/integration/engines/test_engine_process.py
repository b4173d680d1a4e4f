"""The process around an engine: its death fails its own runs only, it comes back, and it never outlives its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.processors.core.admission import DeviceCapacity, Ledger
from penstock.processors.engines.base import EngineGone, EngineState
from penstock.processors.models.catalog import Catalog, ModelConfig
from penstock.processors.models.manager import Lifecycle, ModelManager
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, InvalidRequest

from .conftest import Run, StartEngine, changed_copy


async def until(condition: Any, timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_death_is_told_once_for_all_runs(start_engine: StartEngine, tiny_lm: Path) -> None:
    codes: list[int] = []
    runner = await start_engine("text", tiny_lm, host={"on_died": codes.append}, ignore_eos=True)
    runs = [await runner.chat(f"Story {number}", max_tokens=800) for number in range(3)]
    await asyncio.wait_for(runs[0].first.wait(), 30)
    preparing = asyncio.create_task(runner.chat("word " * 100_000, max_tokens=1))
    prepared = runner.spec(prompt="x")
    late = await runner.engine.prepare(prepared)
    pid = runner.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while runner.engine.state is not EngineState.DEAD:
            await asyncio.sleep(0)
    assert not codes
    runs.append(Run(runner.engine, prepared, late))  # given to it before its end was told
    with pytest.raises(EngineGone):
        await preparing
    with pytest.raises(EngineGone):
        await runner.chat("Story", max_tokens=5)
    await until(lambda: codes)
    assert codes == [-signal.SIGKILL]
    assert not psutil.pid_exists(pid)
    assert not any(run.done.done() for run in runs), "the sinks are told nothing"
    assert (await Run(runner.engine, prepared, late).failed()).retryable_here, "after that each is told"
    with pytest.raises(RuntimeError, match="starts once"):
        await runner.engine.start()


async def test_a_stuck_process_is_killed(start_engine: StartEngine, tiny_lm: Path) -> None:
    codes: list[int] = []
    runner = await start_engine("text", tiny_lm, host={"on_died": codes.append}, silent_s=3, ignore_eos=True)
    await runner.chat("Story", max_tokens=900)
    pid = runner.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: codes)
    assert codes == [-signal.SIGKILL]


async def test_stop_ends_even_a_stuck_process(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    run = await runner.chat("Story", max_tokens=900)
    pid = runner.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await runner.engine.stop()
    assert not run.done.done(), "what is stopped is not told"
    assert not psutil.pid_exists(pid)
    assert runner.engine.state is EngineState.STOPPED
    with pytest.raises(EngineGone):
        await runner.chat("anybody there?")


async def test_a_model_that_cannot_be_loaded_says_why(start_engine: StartEngine, tiny_lm: Path, tmp_path: Path) -> None:
    broken = changed_copy(tiny_lm, tmp_path, "config.json", '{"model_type": "no-such-architecture"}')
    with pytest.raises(EngineFailed, match="could not be loaded"):
        await start_engine("text", broken)
    with pytest.raises(InvalidRequest, match="too small"):
        await start_engine("text", tiny_lm, cache_tokens=32)


async def test_memory_is_granted_before_and_given_back_after(tiny_lm: Path) -> None:
    config = ModelConfig(id="m", source=str(tiny_lm), engine="text")
    ledger = Ledger([DeviceCapacity(device="cpu", kind="cpu", total_bytes=1 << 30)])
    manager = ModelManager(Catalog([config]), ledger)
    engine = await manager.load("m")
    try:
        measured = engine.measured_memory()
        assert measured is not None
        assert 0 < measured <= ledger.reserved_bytes("cpu") == manager.need_bytes("m")
    finally:
        await manager.stop()
    assert ledger.reserved_bytes("cpu") == 0
    assert manager.state("m") is Lifecycle.ABSENT
    small = ModelManager(Catalog([config]), Ledger([DeviceCapacity(device="cpu", kind="cpu", total_bytes=1 << 20)]))
    with pytest.raises(InsufficientCapacity) as caught:
        await small.load("m")
    assert caught.value.details is not None
    assert caught.value.details["need"] > caught.value.details["capacity"]


WORKER = """
    import asyncio, sys
    from penstock.processors.models.catalog import ModelConfig
    from penstock.processors.models.factory import make_engine
    from penstock.processors.models.sizing import size_model

    async def main():
        config = ModelConfig(id="m", source=sys.argv[1], engine="text", options={"threads": 1})
        engine = make_engine(config, await size_model(config))
        await engine.start()
        print(engine.pid, flush=True)
        await asyncio.sleep(600)

    if __name__ == "__main__":
        asyncio.run(main())
"""


def test_an_engine_does_not_outlive_a_killed_worker(tiny_lm: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    worker = subprocess.Popen([sys.executable, str(script), str(tiny_lm)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    try:
        engine = int(worker.stdout.readline())
        family = psutil.Process(worker.pid).children(recursive=True)
        assert engine in {process.pid for process in family}
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    give_up = time.monotonic() + 20
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
        assert time.monotonic() < give_up, family
        time.sleep(0.05)
