"""Loading is given up at once, whatever it is doing, and nothing of it holds up the worker's end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from penstock.processors.engines.base import EngineGone, Limits
from penstock.processors.engines.process.host import ChildEngine
from penstock.schemas.errors import EngineFailed
from support import alive, wait_until

pytestmark = pytest.mark.alone

ENDS_WITHIN_S = 5.0

WORKER = """
    import asyncio, sys, time
    from penstock.processors.engines.base import Limits
    from penstock.processors.engines.process.host import ChildEngine
    from penstock.processors.models.catalog import ModelConfig
    from penstock.processors.models.factory import make_engine
    from penstock.processors.models.manager import ModelManager

    def never_loaded(config, size, device, granted_bytes):
        return ChildEngine("m", "engine_backends:NeverLoaded", "nowhere", {}, limits=Limits(slots=1))

    class Reports:
        def __getattr__(self, name):
            return lambda *told: print("told", name, told, flush=True)

    async def main(source, way):
        config = ModelConfig(id="m", source=source, engine="text", options={"threads": 1})
        manager = ModelManager([config], Reports(), make=never_loaded if way == "never" else make_engine)
        manager.load("m", 0, "cpu", 1 << 28)
        print("loading", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        began = time.monotonic()
        await manager.stop()
        print(f"stopped {time.monotonic() - began:.2f} {len(asyncio.all_tasks())}", flush=True)

    if __name__ == "__main__":
        asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("way", ["importing", "never", "real"])
def test_a_worker_that_ends_while_a_model_loads(way: str, tiny_lm: Path, tmp_path: Path) -> None:
    """While the fork server imports torch; while a model loads for ever; at some time of a real load."""
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    tests = str(Path(__file__).parents[2])
    worker = subprocess.Popen(
        [sys.executable, str(script), str(tiny_lm), way],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    family: list[psutil.Process] = []
    try:
        assert worker.stdout.readline() == "loading\n"

        def children() -> list[psutil.Process]:
            return psutil.Process(worker.pid).children(recursive=True)

        # Its children: a resource tracker, the fork server, and then the engine.
        least = {"importing": 2, "never": 3, "real": 3}[way]
        wait_until(lambda: len(children()) >= least, 200, "the processes: importing torch takes a while")
        family = children()
        worker.stdin.write("stop\n")
        worker.stdin.flush()
        worker.wait(ENDS_WITHIN_S)
        told = worker.stdout.readline()
        assert told.startswith("stopped"), "nothing is told by a manager that stops"
        assert told.endswith(" 1\n"), "no task is left"
        assert worker.returncode == 0
        wait_until(lambda: not any(map(alive, family)), ENDS_WITHIN_S, lambda: [p for p in family if alive(p)])
    finally:
        worker.kill()
        worker.wait()
        worker.stdin.close()
        worker.stdout.close()


@pytest.mark.parametrize("moment", ["at once", "while it loads"])
async def test_a_start_that_is_cancelled_leaves_no_process(moment: str) -> None:
    engine = ChildEngine("m", "engine_backends:NeverLoaded", "nowhere", {}, limits=Limits(slots=1))
    start = asyncio.create_task(engine.start())
    async with asyncio.timeout(60):
        while moment != "at once" and engine.pid is None:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    pid = engine.pid
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    async with asyncio.timeout(ENDS_WITHIN_S):
        await engine.stop()
    assert pid is None or not psutil.pid_exists(pid)


async def test_stop_ends_a_start_that_somebody_waits_for() -> None:
    engine = ChildEngine("m", "engine_backends:NeverLoaded", "nowhere", {}, limits=Limits(slots=1))
    start = asyncio.create_task(engine.start())
    async with asyncio.timeout(60):
        while engine.pid is None:
            await asyncio.sleep(0.01)
    pid = engine.pid
    async with asyncio.timeout(ENDS_WITHIN_S):
        await engine.stop()
        with pytest.raises(EngineGone):
            await start
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("how", ["its load hangs", "the process stands still"])
async def test_a_load_without_a_sign_of_life_is_ended(how: str) -> None:
    """It was noticed when the time for the whole load was over."""
    engine = ChildEngine("m", "engine_backends:NeverLoaded", "nowhere", {}, limits=Limits(slots=1), silent_s=5)
    start = asyncio.create_task(engine.start())
    async with asyncio.timeout(60):
        while engine.pid is None:
            await asyncio.sleep(0.01)
    if how == "the process stands still":
        os.kill(engine.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineFailed, match="no sign of life for 5 s while it loaded"):
            async with asyncio.timeout(60):
                await start
    finally:
        await engine.stop()


async def test_a_load_that_computes_for_long_is_not_ended() -> None:
    engine = ChildEngine("m", "engine_backends:LoadsLong", "nowhere", {}, limits=Limits(slots=1), silent_s=5)
    try:
        await engine.start()
    finally:
        await engine.stop()


async def test_a_load_that_takes_too_long_is_ended() -> None:
    warm = ChildEngine("m", "engine_backends:Plain", "nowhere", {}, limits=Limits(slots=1))
    await warm.start()  # so that the time below is not spent on importing torch
    engine = ChildEngine("m", "engine_backends:NeverLoaded", "nowhere", {}, limits=Limits(slots=1), load_timeout_s=2)
    try:
        with pytest.raises(EngineFailed, match="within 2 s"):
            await engine.start()
    finally:
        await warm.stop()
        await engine.stop()
    assert engine.pid is not None
    assert not psutil.pid_exists(engine.pid)
